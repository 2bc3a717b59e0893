"""`<prefix>.json` beside a token file: which tokenizer made it, and from how much text.

Optional (Megatron's tools neither write nor need it). Where it is, training with another tokenizer
is refused: ids would mean other text and nothing else would say so.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from megatron_tlt.data.tokenizer import Tokenizer
from megatron_tlt.files import write_json


def provenance_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.json")


def write_provenance(prefix: str | Path, facts: Mapping[str, object]) -> None:
    write_json(provenance_path(prefix), facts)


def read_provenance(prefix: str | Path) -> dict[str, object]:
    """Empty where the file is absent."""
    path = provenance_path(prefix)
    return json.loads(path.read_text()) if path.is_file() else {}


def check_tokenizer(prefix: str | Path, tokenizer: Tokenizer) -> None:
    """Raise ValueError when `prefix` is known to come from another tokenizer."""
    made_by, used = read_provenance(prefix).get("tokenizer"), tokenizer.identity()
    if made_by is not None and made_by != used:
        raise ValueError(
            f"{prefix} was tokenized by {made_by}, this run uses {used}: use that tokenizer, or "
            f"preprocess again (delete {provenance_path(prefix)} only if the ids mean the same)"
        )
