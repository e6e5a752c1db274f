"""Files that are whole or not there: written under a temporary name, synced and renamed."""

import csv
import io
import os
from pathlib import Path
from typing import Any

from trainer.errors import UserError


def write_atomically(path: Path, content: bytes) -> None:
    """Write, sync, rename; on a full disk or a read-only folder, one clear line and no half-written file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise UserError(
            f"{path}: cannot be written ({error.strerror}); free space or choose another run_dir"
        ) from error
    finally:  # gone by now, unless the disk was full or the program interrupted
        temporary.unlink(missing_ok=True)


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    """Rows as CSV, with a column for every name in any of them."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(
        text, fieldnames=list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n"
    )
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(path, text.getvalue().encode())
