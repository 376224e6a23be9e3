"""The scripts import each other by bare name, as a script's own folder makes possible."""

from __future__ import annotations

import sys

from tests.conftest import REPOSITORY

# Last: none of their names may hide another module.
sys.path.append(str(REPOSITORY / "scripts" / "bench"))
