"""langchain's standard tests of a deepagents sandbox, run against our backend with the installed deepagents version."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any

import pytest
from langchain_tests.integration_tests import SandboxIntegrationTests

from cobox import Cobox
from cobox.deepagents import IS_07, CoboxBackend

RELATIVE = "asserts relative paths; since deepagents 0.7 glob returns absolute paths, so that deny rules apply to them"
# Each asserts a rule that deepagents 0.7 itself changed; deepagents' own backends fail the same tests.
CHANGED_IN_07 = {
    "test_write_existing_file_fails": "asserts that write only creates; since deepagents 0.7 it replaces",
    "test_glob": RELATIVE,
    "test_glob_basic_pattern": RELATIVE,
    "test_glob_hidden_files_explicitly": RELATIVE,
    "test_glob_with_character_class": RELATIVE,
    "test_glob_with_question_mark": RELATIVE,
    "test_glob_with_directories": "asserts that glob finds directories; since deepagents 0.7 it finds files only",
}
_numbers = itertools.count()


def python_on_the_path(session: Any) -> dict[str, str]:
    """The tests run `python`, which some systems only have as python3; the sandbox uses the system's programs."""
    session.exec("mkdir -p /tmp/bin && ln -sf /usr/bin/python3 /tmp/bin/python").check()
    return {"PATH": "/tmp/bin:/usr/local/bin:/usr/bin:/bin"}


class TestCoboxBackend(SandboxIntegrationTests):
    @pytest.fixture(scope="class")
    def sandbox(self, broker: Any) -> Iterator[CoboxBackend]:
        with Cobox(broker.url, broker.agent_key) as client, client.session(f"standard-{os.getpid()}-{next(_numbers)}", release=True) as box:
            backend = CoboxBackend(box, env=python_on_the_path(box))
            yield backend
            backend.close()

    @pytest.fixture(autouse=True)
    def as_its_version_has_it(self, request: pytest.FixtureRequest) -> None:
        reason = CHANGED_IN_07.get(request.node.originalname)
        if IS_07 and reason is not None:
            request.applymarker(pytest.mark.xfail(strict=True, reason=reason))


def test_every_test_that_is_expected_to_fail_exists() -> None:
    assert [name for name in CHANGED_IN_07 if not hasattr(SandboxIntegrationTests, name)] == []
