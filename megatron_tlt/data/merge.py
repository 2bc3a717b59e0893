"""Several token files into one."""

from collections.abc import Sequence
from pathlib import Path

from megatron_tlt.data.indexed import IndexedDataset, IndexedDatasetWriter, idx_path
from megatron_tlt.data.provenance import read_provenance, write_provenance


def find_prefixes(inputs: Sequence[str | Path]) -> list[str]:
    """Prefixes named directly, or all in a folder by name. Raises ValueError for a folder
    without."""
    prefixes = []
    for name in inputs:
        folder = Path(name)
        if not folder.is_dir():
            prefixes.append(str(name))
            continue
        found = sorted(str(path.with_suffix("")) for path in folder.glob("*.idx"))
        if not found:
            raise ValueError(f"folder {name} holds no .idx file")
        prefixes.extend(found)
    return prefixes


def merge_datasets(prefixes: Sequence[str], output_prefix: str) -> tuple[int, int]:
    """Write the documents of `prefixes`, in order, as one file; returns documents and tokens.

    Raises ValueError before any work when token types or tokenizers differ, or when the output is
    one of the inputs.
    """
    inputs = [IndexedDataset(prefix) for prefix in prefixes]
    types = {prefix: str(data.dtype) for prefix, data in zip(prefixes, inputs, strict=True)}
    if len(set(types.values())) > 1:
        raise ValueError(f"token types differ, preprocess with one tokenizer: {types}")
    known = {prefix: read_provenance(prefix) for prefix in prefixes}
    facts = [fact for fact in known.values() if fact]
    if any(fact != facts[0] for fact in facts):
        raise ValueError(f"the files come from different tokenizers or settings: {known}")
    if idx_path(output_prefix).resolve() in {idx_path(prefix).resolve() for prefix in prefixes}:
        raise ValueError(f"--output-prefix {output_prefix} is one of the inputs")
    with IndexedDatasetWriter(output_prefix, dtype=inputs[0].dtype) as writer:
        for prefix in prefixes:
            writer.add_index(prefix)
        counts = writer.num_documents, writer.num_tokens
    if len(facts) == len(prefixes):
        write_provenance(output_prefix, facts[0])
    return counts
