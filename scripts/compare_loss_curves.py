#!/usr/bin/env python3
"""Train with the reference backward and with another one, and say whether the loss curves agree (see --help)."""

import sys

from mindspeed_mamba3_plugin.training.compare import main

if __name__ == "__main__":
    sys.exit(main())
