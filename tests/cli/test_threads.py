"""Threads sleep while they wait, unless somebody says otherwise."""

import os

import pytest

from undertow.cli.threads import patient_threads


@pytest.mark.parametrize(("given", "wanted"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_wait_policy(monkeypatch, given, wanted):
    monkeypatch.setenv("OMP_WAIT_POLICY", given or "")
    if given is None:
        monkeypatch.delenv("OMP_WAIT_POLICY")
    patient_threads()
    assert os.environ["OMP_WAIT_POLICY"] == wanted
