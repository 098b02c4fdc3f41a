"""Two examiners, as on two nodes, in this process."""

from pathlib import Path

from trireme.doctor.examiner import Examiner
from trireme.doctor.facts import Questions

TOKEN = b"0123456789abcdef"


def test_they_reach_each_other_and_look_for_the_file_of_the_driver(tmp_path: Path) -> None:
    one = Examiner("one", TOKEN)
    endpoints = Examiner("two", TOKEN).report(Questions(), "127.0.0.1", range(23000, 23100)).endpoints
    assert len(endpoints) == 3, "any port, the first and the last of the range"
    assert all(23000 <= at.port < 23100 for at in endpoints[1:])
    links = one.reach({"two": endpoints})
    assert [(link.source, link.target, link.error) for link in links] == [("one", "two", "")] * 3
    assert one.rates({"two": endpoints[0]})["two"] > 0
    (tmp_path / "trial").touch()
    assert one.report(Questions(str(tmp_path / "trial")), "127.0.0.1", ()).facts.shares_run_directory
    assert not one.report(Questions(str(tmp_path / "another")), "127.0.0.1", ()).facts.shares_run_directory
