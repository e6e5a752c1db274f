"""What train.py, evaluate.py and solve.py share: one line for a mistake, no directory before the settings are right.

    run_train(job, argv=None)                            train.py; job(config: TrainConfig) runs under Hydra, also per -m job
    compose_settings(name, argv, EvaluateConfig)         evaluate.py and solve.py; returns settings, creates nothing
    run_program(main)                                    calls main(), turns UserError into one line and exit code 2
    dump_config(config)                                  YAML that `python train.py from=<file>` reads again

evaluate.py then ends in

    if __name__ == "__main__":
        run_program(lambda: main(compose_settings("evaluate", sys.argv[1:], EvaluateConfig)))

where main returns None or an exit code, and train.py in `run_train(main)`.
"""
