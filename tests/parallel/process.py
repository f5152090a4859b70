"""One process of a parallel test: `process.py RANK WORLD FOLDER STAGE`. Prints what it found wrong, and exits with 1.

A world of one makes the references; a world of two compares every layout with them. On a CPU the ranks speak gloo
and run the reference operator; on GPUs, one each, NCCL and the Triton kernels.
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils._pytree import keystr, tree_flatten_with_path


def main(rank: int, world: int, folder: Path, stage: str) -> list[str]:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    from mindspeed_mamba3_plugin import enable, platforms
    from mindspeed_mamba3_plugin.ops import registry

    platform = platforms.current()
    platform.activate()
    enable(mamba3_outproj_norm=True, mamba3_mimo_rank=2, mamba3_chunk_size=8)
    rendezvous = f"file://{folder}/{stage}"
    dist.init_process_group(platform.COLLECTIVE_BACKEND, init_method=rendezvous, rank=rank, world_size=world)
    from job import Layout

    attention = Layout()
    alone = Layout(pattern="MM", groups=1)  # without attention, which is not context parallel without TE
    packed = replace(alone, bounds=(0, 8, 32))
    half = Layout(bf16=True)
    wrong = []
    if stage == "references":
        for name, layout in {"attention": attention, "alone": alone, "packed": packed, "half": half}.items():
            make_reference(folder / name, layout)
        for name, layout in {
            "half": half,
            "half, distributed": replace(half, distributed_optimizer=True),
            "half, distributed, by bucket": replace(half, distributed_optimizer=True, sharding="dp_reshardable"),
            "half, one file": replace(half, sharding="torch"),
            "half, distributed, one file": replace(half, distributed_optimizer=True, sharding="torch"),
        }.items():
            wrong += resumes(name, layout, folder)
    elif stage == "layouts":
        sums = dict(distributed_optimizer=True)
        for name, layout in {
            "TP": replace(attention, tp=2),
            "TP, SP": replace(attention, tp=2, sequence_parallel=True, **sums),
            "PP": replace(attention, pp=2),
            "PP, distributed": replace(attention, pp=2, **sums),
            "DP": attention,
            "DP, distributed": replace(attention, **sums),
            "DP, distributed, overlap": replace(attention, overlap=True, **sums),
            "DP, overlap": replace(attention, overlap=True),
        }.items():
            wrong += compare(name, layout, folder / "attention")
        for name, layout in {
            "TP, one group": replace(alone, tp=2),
            "TP, SP, one group": replace(alone, tp=2, sequence_parallel=True, **sums),
            "CP": replace(alone, cp=2),
            "CP, distributed": replace(alone, cp=2, mamba3=dict(mamba3_recompute=True), **sums),
        }.items():
            wrong += compare(name, layout, folder / "alone")
        for name, layout in {
            "CP": replace(packed, cp=2),
            "TP, SP": replace(packed, tp=2, sequence_parallel=True),
        }.items():
            wrong += compare(f"{name}, packed", layout, folder / "packed")
    elif stage == "checkpoints":
        for name, layout in {
            "TP, bf16": replace(half, tp=2, distributed_optimizer=True),
            "DP, bf16": replace(half, distributed_optimizer=True, sharding="dp_reshardable"),
            "PP, bf16, plain": replace(half, pp=2),
        }.items():
            wrong += takes_over(name, layout, folder)
    elif stage == "back":
        for name in ("TP, bf16", "DP, bf16", "PP, bf16, plain"):
            wrong += comes_back(name, replace(half, distributed_optimizer="plain" not in name), folder)
    dist.destroy_process_group()
    family, calls = "reference." if platform.NAME == "cpu" else "triton-", registry.kernel_calls()
    if not calls or not all(call.startswith(family) for call in calls):
        wrong.append(f"kernels called: {calls}, should be {family}*")
    return wrong


def make_reference(folder: Path, layout) -> None:
    """Initial weights, the gradients and the loss curve of one process, and checkpoints on the way."""
    from job import Job
    from megatron.core import dist_checkpointing

    for distributed in (False, True):
        job = Job(replace(layout, distributed_optimizer=distributed))
        if not distributed:
            scatter(job)
            job.save(folder / "start")
            job.gradients(0)
            job.save_gradients(folder / "gradients")
        else:
            job.load(folder / "start", optimizer=False)
        curve = job.train(0, 1)
        job.save(folder / f"middle{distributed}")
        curve += job.train(2, 3)
        job.save(folder / f"end{distributed}")
        torch.save(curve, folder / f"curve{distributed}")
        job.close()
    assert dist_checkpointing.load_plain_tensors(str(folder / "gradients"))


@torch.no_grad()
def scatter(job) -> None:
    """Move every parameter off its initial value: ones and equal slices would hide a wrong index."""
    g = torch.Generator().manual_seed(3)
    for p in job.core.parameters():
        p.add_((0.1 * torch.randn(p.shape, generator=g)).to(p))
    job.optimizer.reload_model_params()


def compare(name: str, layout, reference: Path) -> list[str]:
    """The layout's gradients and loss curve from the same weights, and from the reference's checkpoint."""
    from job import Job

    wrong = []
    curve = torch.load(reference / f"curve{layout.distributed_optimizer}")
    own = reference / name
    job = Job(layout)
    job.load(reference / "start", optimizer=False)
    job.gradients(0)
    job.save_gradients(own / "gradients")
    wrong += differences(f"{name}: gradient", own / "gradients", reference / "gradients", tolerance=1e-5)
    wrong += curve_differences(name, job.train(0, 1, 2, 3), curve)
    job.close()
    if layout.overlap:  # Megatron does not save this format right when there are several buckets
        return wrong

    job = Job(layout)
    job.load(reference / f"middle{layout.distributed_optimizer}")
    job.save(own / "middle")
    wrong += differences(
        f"{name}: checkpoint", own / "middle", reference / f"middle{layout.distributed_optimizer}", tolerance=0
    )
    wrong += curve_differences(f"{name}, resumed", job.train(2, 3), curve[2:])
    job.close()
    return wrong


def takes_over(name: str, layout, folder: Path) -> list[str]:
    """In bf16 with fp32 parameters kept: every number of a checkpoint of one process arrives, and is saved again; a
    checkpoint of this layout continues as if the run had not stopped."""
    from job import Job

    middle = folder / "half" / f"middle{layout.distributed_optimizer}"
    job = Job(replace(layout, sharding="fully_reshardable"))
    job.load(middle)
    job.save(folder / name / "again")
    wrong = differences(f"{name}: checkpoint", folder / name / "again", middle, tolerance=0)
    job.close()
    return wrong + resumes(name, layout, folder)


def comes_back(name: str, layout, folder: Path) -> list[str]:
    """One process goes on from what the layout saved of its checkpoint as if that had never been elsewhere."""
    from job import Job

    job = Job(layout)
    job.load(folder / name / "again")
    expected = torch.load(folder / "half" / f"curve{layout.distributed_optimizer}")[2:]
    curve = job.train(2, 3)
    job.save(folder / name / "end")
    end = folder / "half" / f"end{layout.distributed_optimizer}"
    wrong = differences(f"{name}: back", folder / name / "end", end, tolerance=0)
    job.close()
    return wrong if curve == expected else [*wrong, f"{name}: back on one process {curve}, should be {expected}"]


def resumes(name: str, layout, folder: Path) -> list[str]:
    """A run that is stopped, saved and resumed has the same curve and the same weights, bit for bit."""
    from job import Job

    from mindspeed_mamba3_plugin.layers.mamba3_mixer import Mamba3Mixer

    wrong = []
    folder = folder / f"resumes {name}"
    job = Job(layout)
    job.load(folder.parent / "half" / "start", optimizer=False)
    job.train(0, 1)
    job.save(folder / "middle")
    whole = job.train(2, 3)
    job.save(folder / "end")
    job.close()
    job = Job(layout)
    job.load(folder / "middle")
    if (curve := job.train(2, 3)) != whole:
        wrong.append(f"{name}: resumed {curve}, would have been {whole}")
    job.save(folder / "end of resumed")
    wrong += differences(f"{name}: resumed", folder / "end of resumed", folder / "end", tolerance=0)
    for mixer in (m for m in job.core.modules() if isinstance(m, Mamba3Mixer)):
        for parameter in ("dt_bias", "D", "B_bias", "C_bias", "mimo_x", "mimo_z", "mimo_o"):
            value = getattr(mixer, parameter)
            if value.dtype != torch.float32 or torch.equal(value, value.bfloat16().float()):
                wrong.append(f"{name}: {parameter} is {value.dtype}, with values of bf16")
    job.close()
    return wrong


def curve_differences(name: str, curve: list, expected: list) -> list[str]:
    pairs = ((a, b) for ours, theirs in zip(curve, expected, strict=True) for a, b in zip(ours, theirs, strict=True))
    off = max(abs(a / b - 1) for a, b in pairs)
    return [] if off < 1e-5 else [f"{name}: curve off by {off:.1e}: {curve}, should be {expected}"]


def differences(name: str, folder: Path, reference: Path, tolerance: float) -> list[str]:
    """What differs between two checkpoints, tensor by tensor; read by the first rank."""
    from megatron.core import dist_checkpointing

    if dist.get_rank() != 0:
        return []
    ours, theirs = (load_whole(f, dist_checkpointing) for f in (folder, reference))
    wrong = [f"{name}: only one has {key}" for key in sorted(ours.keys() ^ theirs.keys())]
    for key in sorted(ours.keys() & theirs.keys()):
        if tolerance == 0:
            bad = not torch.equal(ours[key], theirs[key])
        else:
            off = (ours[key].double() - theirs[key].double()).norm() / theirs[key].double().norm()
            bad = not off < tolerance
        if bad:
            wrong.append(f"{name} {key} differs by {(ours[key].double() - theirs[key].double()).norm():.1e}")
    return wrong


def load_whole(folder: Path, dist_checkpointing) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole, in this process alone."""
    if (folder / "model.pt").exists():
        state = {file.stem: torch.load(file, weights_only=False) for file in folder.iterdir()}
        flat, _ = tree_flatten_with_path(state)
        return {keystr(path): value for path, value in flat if isinstance(value, torch.Tensor)}
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state: dict = {}
    _load_state_dict(
        state, storage_reader=FileSystemReader(folder), planner=_EmptyStateDictLoadPlanner(), no_dist=True
    )
    # Saved by bucket, the optimizer's tensors have padding that nobody wrote.
    written = {key: value for key, value in state.items() if not key.startswith("optimizer.distributed")}
    return {key: value for key, value in written.items() if isinstance(value, torch.Tensor)}


if __name__ == "__main__":
    found = main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
    print("\n".join(found))
    sys.exit(bool(found))
