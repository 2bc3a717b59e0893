"""Prints the folders of the stand-ins that this interpreter needs for SGLang, joined as in PYTHONPATH.

A folder is named only where the real package cannot be imported, so a machine with GPU builds gets none.
"""

import os
import subprocess
import sys
from pathlib import Path

FOLDERS = {"sgl_kernel": "sgl_kernel_cpu", "torchvision": "torchvision_cpu"}


def needed_folders() -> list[str]:
    """Each import is tried in a process of its own: a failed one leaves half a package behind."""
    here = Path(__file__).resolve().parent
    return [
        str(here / folder)
        for package, folder in FOLDERS.items()
        if subprocess.run([sys.executable, "-c", f"import torch, {package}"], capture_output=True).returncode
    ]


if __name__ == "__main__":
    print(os.pathsep.join(needed_folders()))
