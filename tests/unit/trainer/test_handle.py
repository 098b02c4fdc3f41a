"""The trainer's handle, as far as it needs no cluster; `tests/e2e/test_trainer.py` has its verbs."""

import subprocess
import sys

import pytest
from trainer_support import make_config

from trainer.handle import TrainerHandle


def test_blame_names_batches_and_datums():
    assert (
        TrainerHandle.blame([(3, 7), (), (0,)]) == "Not finite: the loss of datum 3, 7 of batch 0; datum 0 of batch 2."
    )
    assert TrainerHandle.blame([tuple(range(99))]).endswith("6, 7, .. of batch 0.")
    assert TrainerHandle.blame([(), ()]) == "The loss of each datum was finite."


def test_options_for_another_number_of_processes_are_refused():
    with pytest.raises(ValueError, match=r"mesh .*'shard': 2.* got 2"):
        TrainerHandle.start(make_config("m", trainer__shards=2, trainer__replicate=2), [{}, {}], None)


def test_importing_it_imports_neither_torch_nor_transformers():
    check = "import sys, trainer.handle; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", check], check=True)
