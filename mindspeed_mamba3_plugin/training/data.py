"""Text that every machine has, the Python standard library's own sources, as byte tokens in Megatron's formats."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from .config import RunConfig

VOCAB_SIZE = 256
END_OF_DOCUMENT = 0  # the one byte that cannot occur in Python source

# Tables of character sets, tests and other people's packages: not text in the sense of the rest.
_SKIPPED_FOLDERS = {
    "test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "pydoc_data", "lib2to3",
}  # fmt: skip


class ByteTokenizer:
    """Bytes are the tokens. Has the attributes that megatron's datasets read from a tokenizer."""

    vocab_size = VOCAB_SIZE
    eod = END_OF_DOCUMENT
    pad = -1
    unique_identifiers: dict[str, str] = {"class": "ByteTokenizer"}  # noqa: RUF012  megatron reads it off instances

    @staticmethod
    def tokenize(text: bytes) -> np.ndarray:
        """Bytes of one document -> uint8 [len + 1], closed by the end-of-document token."""
        return np.frombuffer(text + bytes([END_OF_DOCUMENT]), dtype=np.uint8)

    @staticmethod
    def detokenize(tokens: np.ndarray) -> bytes:
        """Tokens of one document -> its bytes, without the end-of-document token."""
        return np.asarray(tokens, dtype=np.uint8).tobytes().rstrip(bytes([END_OF_DOCUMENT]))


def text_files() -> list[Path]:
    """The standard library's Python sources, in a fixed order."""
    root = Path(sysconfig.get_path("stdlib"))
    files = (p for p in root.rglob("*.py") if not _SKIPPED_FOLDERS.intersection(p.relative_to(root).parts))
    return sorted(p for p in files if p.is_file())


def prepare(folder: Path, max_bytes: int | None = None) -> dict:
    """Tokenise the text into `folder`/text.bin and .idx, once; later calls find it done.

    Returns:
        {"prefix": path of the two files without ending, "documents", "tokens", "digest": of the tokens,
        "unigram_loss": nats per token of the best model that knows only how frequent each byte is}
    """
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    stamp = folder / "text.json"
    wanted = {"python": sys.version, "max_bytes": max_bytes}
    if stamp.is_file():
        known = json.loads(stamp.read_text())
        if known.pop("source") == wanted:
            return {"prefix": str(folder / "text"), **known}

    folder.mkdir(parents=True, exist_ok=True)
    stamp.unlink(missing_ok=True)
    builder = IndexedDatasetBuilder(str(folder / "text.bin"), dtype=np.uint8)
    counts, documents, digest = np.zeros(VOCAB_SIZE, dtype=np.int64), 0, hashlib.sha256()
    print(f"tokenising the Python standard library's sources into {folder}", flush=True)
    for path in tqdm(text_files(), unit="file", disable=not sys.stderr.isatty()):
        tokens = ByteTokenizer.tokenize(path.read_bytes())
        if len(tokens) == 1 or np.count_nonzero(tokens == END_OF_DOCUMENT) != 1:
            continue
        builder.add_document(tokens, [len(tokens)])
        counts += np.bincount(tokens, minlength=VOCAB_SIZE)
        digest.update(tokens)
        documents += 1
        if max_bytes is not None and counts.sum() >= max_bytes:
            break
    builder.finalize(str(folder / "text.idx"))
    if documents == 0:
        raise RuntimeError(f"no Python sources found under {sysconfig.get_path('stdlib')}")
    facts = {
        "documents": documents,
        "tokens": int(counts.sum()),
        "digest": digest.hexdigest(),
        "unigram_loss": _entropy(counts),
    }
    stamp.write_text(json.dumps({"source": wanted, **facts}, indent=1))
    return {"prefix": str(folder / "text"), **facts}


def _entropy(counts: np.ndarray) -> float:
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())


def batches(
    run: RunConfig, prefix: str, cache: Path, rank: int = 0, ranks: int = 1
) -> Iterator[dict[str, torch.Tensor]]:
    """Endless-looking stream of micro-batches for data-parallel `rank` of `ranks`, enough for the whole run.

    Yields:
        tokens, labels, position_ids: int64 [micro_batch_size, sequence_length]; loss_mask: fp32, same shape
    """
    size = run.training.micro_batch_size
    dataset = _gpt_dataset(run, prefix, cache, ranks)
    for micro in range(run.training.steps * run.training.num_microbatches):
        first = (micro * ranks + rank) * size
        samples = [dataset[i] for i in range(first, first + size)]
        yield {key: torch.stack([s[key] for s in samples]) for key in samples[0]}


def _gpt_dataset(run: RunConfig, prefix: str, cache: Path, ranks: int):
    build_index_helper()
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    t = run.training
    config = GPTDatasetConfig(
        random_seed=t.seed,
        sequence_length=run.data.sequence_length,
        blend=([prefix], None),
        split="1,0,0",
        path_to_cache=str(cache),
        tokenizer=ByteTokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    sizes = [t.steps * t.num_microbatches * t.micro_batch_size * ranks, 0, 0]
    return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()[0]


def build_index_helper(target: Path | None = None) -> None:
    """Compile the C++ index builder of megatron.core.datasets, where the installed megatron-core came without it.

    Its wheels carry it compiled, its source tree does not. `target` is the folder to compile into (default: beside
    its source).

    Raises:
        RuntimeError: there is no compiler, or it failed; with the compiler's message.
    """
    if target is None and find_spec("megatron.core.datasets.helpers_cpp") is not None:
        return
    pybind11 = import_module("pybind11")
    source = Path(find_spec("megatron.core.datasets").submodule_search_locations[0]) / "helpers.cpp"
    binary = (target or source.parent) / f"helpers_cpp{sysconfig.get_config_var('EXT_SUFFIX')}"
    includes = [f"-I{path}" for path in (sysconfig.get_path("include"), pybind11.get_include())]
    command = ["c++", "-O3", "-shared", "-std=c++17", "-fPIC", *includes, str(source), "-o", str(binary)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        raise RuntimeError("megatron-core's dataset helper must be compiled, and there is no C++ compiler") from None
    if done.returncode:
        raise RuntimeError(f"megatron-core's dataset helper does not compile:\n{done.stderr}")
