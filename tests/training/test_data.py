from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from mindspeed_mamba3_plugin.training import data


def test_tokens_read_back_are_the_sources(text):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(text / "text"))
    sources = [b for p in data.text_files() if (b := p.read_bytes()) and 0 not in b]
    assert len(dataset) > 3
    for i in range(len(dataset)):
        assert data.ByteTokenizer.detokenize(dataset[i]) == sources[i]


def test_the_text_is_prepared_once_and_again_when_asked_for_more(tmp_path):
    first = data.prepare(tmp_path, 20_000)
    written = (tmp_path / "text.bin").stat().st_mtime_ns
    assert data.prepare(tmp_path, 20_000) == first
    assert (tmp_path / "text.bin").stat().st_mtime_ns == written
    assert data.prepare(tmp_path, 400_000)["tokens"] > first["tokens"] >= 20_000


def test_unigram_loss_is_the_entropy_of_the_bytes(text):
    facts = data.prepare(text, 100_000)
    tokens = np.fromfile(text / "text.bin", dtype=np.uint8)
    assert len(tokens) == facts["tokens"]
    p = np.unique(tokens, return_counts=True)[1] / len(tokens)
    assert facts["unigram_loss"] == pytest.approx(-(p * np.log(p)).sum(), rel=1e-12)
    assert 2.5 < facts["unigram_loss"] < 4.0


def test_batches_are_shifted_text_and_the_same_every_time(small, text):
    def take(**ranks):
        return list(data.batches(small, str(text / "text"), text / "index", **ranks))

    batches = take()
    assert len(batches) == small.training.steps
    whole = (text / "text.bin").read_bytes()
    for batch in batches:
        assert batch["tokens"].shape == (small.training.micro_batch_size, small.data.sequence_length)
        assert torch.equal(batch["tokens"][:, 1:], batch["labels"][:, :-1])
        assert bool((batch["loss_mask"] == 1).all())
        assert bytes(batch["tokens"][0].tolist())[:20] in whole
    assert all(torch.equal(a["tokens"], b["tokens"]) for a, b in zip(batches, take(), strict=True))
    ranks = [take(rank=r, ranks=2)[0]["tokens"] for r in (0, 1)]
    assert not torch.equal(*ranks)


def test_a_missing_index_helper_is_compiled(tmp_path, monkeypatch):
    commands = []
    monkeypatch.setattr(
        data.subprocess,
        "run",
        lambda command, **_: commands.append(command) or data.subprocess.CompletedProcess(command, 1, "", "no luck"),
    )
    with pytest.raises(RuntimeError, match="does not compile:\nno luck"):
        data.build_index_helper(tmp_path)
    assert Path(commands[0][-1]).parent == tmp_path and commands[0][-3].endswith("helpers.cpp")
    assert Path(commands[0][-3]).is_file()
