"""Labels of the learning loop as SLURM jobs, on a real SLURM of this machine."""

from __future__ import annotations

import json
from contextlib import suppress

from ase.calculators.emt import EMT

from forgefield.trust.loop.label import label_structures
from forgefield.trust.loop.options import LabelOptions
from tests.support.labelling import copper_structures, label_command


def test_jobs_label_structures_and_are_found_again_after_an_interruption(slurm, tmp_path):
    options = LabelOptions(command=label_command(), frames_per_job=2, sbatch=["--ntasks=1", "--time=5"], poll=0.5)
    frames, folder = copper_structures(3, gold=(2,)), tmp_path / "labels"

    class Interrupted(Exception):
        pass

    def interrupt(text: str) -> None:
        raise Interrupted

    with suppress(Interrupted):
        label_structures(frames, options, folder, notify=interrupt)
    jobs = {path.parent.name: json.loads(path.read_text())["job"] for path in folder.glob("job-*/job.json")}
    labelled, failed = label_structures(frames, options, folder, notify=lambda text: None)
    assert {path.parent.name: json.loads(path.read_text())["job"] for path in folder.glob("job-*/job.json")} == jobs
    assert list(failed) == [2]
    frames[0].calc = EMT()
    assert abs(labelled[0].get_potential_energy() - frames[0].get_potential_energy()) < 1e-6
    assert [path.read_text() for path in sorted(folder.glob("job-*/computed.txt"))] == ["0\n1\n"]
