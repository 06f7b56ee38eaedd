"""Shared by all tests: the project on sys.path, one thread (two test processes on two cores would crawl), a tiny base."""
import os
import sys

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """Folder of an embedded model after a short warm start: it speaks the agents' formats, and is often wrong."""
    import train

    out = tmp_path_factory.mktemp("warm")
    train.embedded_model(train.Config(out=str(out), warm_steps=120))
    return out / "base"
