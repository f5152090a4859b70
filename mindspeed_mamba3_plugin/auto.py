"""`import mindspeed_mamba3_plugin.auto` as the first import of a training script does what `launch SCRIPT` does: the
script's flags decide, and without --use-mamba3-mixer nothing is changed."""

import sys

from .launch import prepare

prepare(sys.argv[0], sys.argv[1:])
