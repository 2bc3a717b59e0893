"""Publishing files: a reader sees the old content, or all of the new, never a part."""

import json
import os
from pathlib import Path


def fsync_path(path: Path) -> None:
    """Make a file's content, or a folder's names, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Replace `path` by `text`: temporary name in the same folder, fsync, rename, fsync of the folder."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    temporary.write_text(text, encoding="utf-8")
    fsync_path(temporary)
    os.replace(temporary, path)
    fsync_path(path.parent)


def write_json(path: Path, value: object) -> None:
    """`write_text` of indented JSON; NaN and infinity raise ValueError."""
    write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def publish_folder(partial: Path, final: Path) -> None:
    """Rename the complete folder `partial` to `final`, replacing what is there."""
    for file in partial.rglob("*"):
        fsync_path(file)
    fsync_path(partial)
    if final.exists():
        # A folder cannot replace another in one step: the old one keeps its data under a hidden name
        # until the new one stands.
        retired = final.with_name(f".{final.name}.retired")
        os.replace(final, retired)
        os.replace(partial, final)
        delete_folder(retired)
    else:
        os.replace(partial, final)
    fsync_path(final.parent)


def delete_folder(folder: Path) -> None:
    """Delete a folder tree; one that is already gone is fine, anything else raises OSError."""
    if not folder.exists():
        return
    # Out of sight first, so that a killed deletion leaves no half folder under a real name.
    hidden = folder if folder.name.startswith(".") else folder.with_name(f".{folder.name}.deleted")
    if hidden != folder:
        os.replace(folder, hidden)
    for path in sorted(hidden.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    hidden.rmdir()
