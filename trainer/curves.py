"""Pictures of accuracy against depth, with published curves beside ours only where the setting is the same."""

import io
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import LogLocator, NullFormatter

from trainer.files import write_atomically

PUBLISHED = Path(__file__).with_name("published.json")
OWN_CONNECTION = {"trm": "carry_last", "infiloop": "attention_residual"}
"""What makes a model of this name the published one."""


def published_curve(results: dict[str, Any]) -> tuple[list[int], list[float]] | None:
    """(executed layers, exact accuracy in per cent) of the paper's run in the setting of `results`, or None.

    Same setting means: the same data set and split, H and L cycles, width and mixer, the model's own connection on both
    axes, fixed depth, all or a random part of the test puzzles. A generated data set never matches.
    """
    published = json.loads(PUBLISHED.read_text())
    here = {**results["model_settings"], **results}
    curve = published["exact_accuracy_percent"].get(results["model"])
    same = all(here[key] == value for key, value in published["setting"].items())
    if curve is None or not same or results["halting"] != "off" or results["starts"] > 1:
        return None
    if here["axes"] != "both" or here["connection"]["kind"] != OWN_CONNECTION[results["model"]]:
        return None
    return published["executed_layers"], curve


def curve_label(results: dict[str, Any]) -> str:
    """Which model, puzzles, cycles and weights a line stands for."""
    r = results
    cycles = f"H={r['H_cycles']} L={r['L_cycles']}"
    data = f"{r['data']} [{r['data_fingerprint'][:6]}] {r['split']}"
    breadth = f", {r['starts']} starts, {r['choose']}" if r["starts"] > 1 else ""
    return f"{r['model']}: {data}, n={r['n']}, {cycles}, {r['weights']}, seed {r['seed']}{breadth}"


def draw_depth_curve(results: list[dict[str, Any]], path: Path) -> None:
    """One line per evaluation: exact accuracy against executed layers, on a logarithmic axis."""
    figure, axes = plt.subplots(figsize=(7.2, 4.8), layout="constrained")
    for colour, r in zip(plt.rcParams["axes.prop_cycle"].by_key()["color"], results, strict=False):
        layers = [d["executed_layers"] for d in r["depths"]]
        exact = [100 * d["exact_accuracy"] for d in r["depths"]]
        axes.plot(layers, exact, marker="." if len(layers) < 60 else "", color=colour, label=curve_label(r))
        if (published := published_curve(r)) is not None:
            axes.plot(
                *published, linestyle="--", marker="x", color=colour, alpha=0.6, label=f"{r['model']}: paper, n=32768"
            )
    trained = {r["trained"]["executed_layers"] for r in results}
    for layers in trained:
        axes.axvline(layers, color="grey", linewidth=0.8, linestyle=":", label="depth in training")
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_ylim(0, 101)
    axes.set_xlabel("executed layers (block applications x layers per block)")
    axes.set_ylabel("exact accuracy, % of puzzles")
    axes.grid(alpha=0.3, which="both")
    figure.legend(fontsize=8, loc="outside lower left")  # within, it would hide points
    picture = io.BytesIO()
    figure.savefig(picture, dpi=130, format="png")
    plt.close(figure)
    write_atomically(path, picture.getvalue())
