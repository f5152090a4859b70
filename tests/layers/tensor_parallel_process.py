"""One of two tensor-parallel processes: rank and the path of a rendezvous file as arguments.

Prints what it found wrong and exits with 1, or exits with 0.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

TP = 2


def main(tp_rank: int, rendezvous: str) -> list[str]:
    from mindspeed_mamba3_plugin.platforms import cpu, detect

    torch.set_num_threads(1)
    if detect() == "cpu":
        cpu.activate()
    from building import HIDDEN, build_mixer, process_groups, scatter_values
    from megatron.core import parallel_state
    from megatron.core.transformer import utils

    from mindspeed_mamba3_plugin.layers.weights import shard

    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=tp_rank, world_size=TP)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=TP)
    groups = process_groups()
    alone = process_groups()
    alone.tp = [dist.new_group([r]) for r in range(TP)][tp_rank]

    wrong = []
    common = dict(mamba_num_groups=2, mamba3_outproj_norm=True)
    for sequence_parallel in (False, True):
        for recompute in (False, True):
            label = f"sequence_parallel={sequence_parallel} recompute={recompute}"
            torch.manual_seed(0)
            whole = build_mixer(alone, **common)
            torch.manual_seed(0)
            split = build_mixer(
                groups,
                tensor_model_parallel_size=TP,
                sequence_parallel=sequence_parallel,
                mamba3_recompute=recompute,
                **common,
            )
            state = {n: p.detach() for n, p in whole.named_parameters()}
            for name, value in shard(state, whole.sizes, TP, tp_rank).items():
                if not torch.equal(value, split.get_parameter(name)):
                    wrong.append(f"{label}: initial {name} depends on the number of ranks")

            scatter_values(whole)
            local = shard({n: p.detach() for n, p in whole.named_parameters()}, whole.sizes, TP, tp_rank)
            split.load_state_dict(local, strict=False)
            g = torch.Generator().manual_seed(1)
            hidden = torch.randn(12, 2, HIDDEN, generator=g, dtype=torch.float64)
            weight = torch.randn(12, 2, HIDDEN, generator=g, dtype=torch.float64)

            def cut(t, sequence_parallel=sequence_parallel):
                return t.chunk(TP)[tp_rank] if sequence_parallel else t

            x = hidden.clone().requires_grad_()
            expected, _ = whole(x)
            (expected * weight).sum().backward()
            y = cut(hidden).clone().requires_grad_()
            out, _ = split(y)
            (out * cut(weight)).sum().backward()

            pairs = {"output": (out, cut(expected)), "input gradient": (y.grad, cut(x.grad))}
            grads = shard({n: p.grad for n, p in whole.named_parameters()}, whole.sizes, TP, tp_rank)
            for name, value in grads.items():
                pairs[f"gradient of {name}"] = (split.get_parameter(name).grad, value)
            for name, (got, want) in pairs.items():
                error = ((got - want).norm() / want.norm()).item()
                if not error < 1e-10:
                    wrong.append(f"{label}: {name} off by {error:.1e}")

    if hasattr(utils, "ensure_metadata_has_dp_cp_group"):  # before 0.16 every checkpoint is of the global groups
        wrong += checkpoint_differences(whole, split, groups)
    if "megatron.core.ssm.mamba_mixer" in sys.modules:
        wrong.append("the mixer of Mamba-2 was imported, which needs Triton")
    dist.destroy_process_group()
    return wrong


def checkpoint_differences(whole, split, groups) -> list[str]:
    """What the ranks together would save differently from the whole mixer."""
    metadata = {"dp_cp_group": groups.dp_cp}
    of_one = assembled(saved_tensors(whole, metadata))
    shares: list = [None] * TP
    dist.all_gather_object(shares, saved_tensors(split, metadata))
    of_two = assembled([tensor for share in shares for tensor in share])
    wrong = [
        f"checkpoint: {key} differs" for key in of_one if key in of_two and not torch.equal(of_one[key], of_two[key])
    ]
    if of_one.keys() != of_two.keys():
        wrong.append(f"checkpoint keys depend on the number of ranks: {sorted(of_one.keys() ^ of_two.keys())}")
    return wrong


def saved_tensors(mixer, metadata: dict) -> list[tuple]:
    """(key, whole shape, offset, local values) of everything that this rank would write to a checkpoint."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensorFactory

    tensors = []
    for value in mixer.sharded_state_dict("mixer.", metadata=metadata).values():
        if isinstance(value, ShardedTensorFactory):
            tensors += value.build()
        elif not isinstance(value, ShardedObject):
            tensors.append(value)
    return [(t.key, t.global_shape, t.global_offset, t.data.detach()) for t in tensors]


def assembled(tensors: list[tuple]) -> dict[str, torch.Tensor]:
    """The whole tensors by key; what no rank wrote is NaN, which equals nothing."""
    whole = {}
    for key, shape, offset, values in tensors:
        target = whole.setdefault(key, torch.full(shape, torch.nan, dtype=values.dtype))
        target[tuple(slice(o, o + n) for o, n in zip(offset, values.shape, strict=True))] = values
    return whole


if __name__ == "__main__":
    found = main(int(sys.argv[1]), sys.argv[2])
    print("\n".join(found))
    sys.exit(bool(found))
