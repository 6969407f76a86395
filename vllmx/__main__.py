# SPDX-License-Identifier: Apache-2.0
"""`python -m vllmx` is `vllmx`."""

import sys

from vllmx.cli import main

if __name__ == "__main__":
    sys.exit(main())
