"""Forward and backward through the Ascend lowering, natively on the CPU, against the fp64 reference; prints JSON."""

import json
import sys
from unittest import mock

import torch
from cases import exact, gradient_errors, guarded, make, relative_error

from mindspeed_mamba3_plugin.offline import native
from mindspeed_mamba3_plugin.offline.launches import Chip
from mindspeed_mamba3_plugin.ops import reference
from mindspeed_mamba3_plugin.ops.triton import ascend

torch.set_num_threads(1)
options = json.loads(sys.argv[1])
x = make(**{**options, "dtype": getattr(torch, options["dtype"])})
truth = exact(x)
out, _ = reference.chunk_form(truth)
grad_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(x.dtype)
true = reference.backward(truth, grad_out.double())
machine = native.Machine(Chip("Ascend910B3", 2, 3))  # few cores: programs then walk over several tasks
with machine.running(), mock.patch.object(ascend, "target_of", lambda device: "npu"), guarded():
    ours, _ = ascend.forward(x)
    grads = ascend.backward(x, grad_out)
errors = {"out": relative_error(ours, out), **gradient_errors(grads, true)}
print(json.dumps({"errors": errors, "ran": machine.ran}))
