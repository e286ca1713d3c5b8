"""Launch scripts: what they would run, what they refuse, and what runs here.

No cloud is reached: dry runs are compared word by word, and stand-ins for gcloud, srun
and scontrol, put first on the path, write down what they are called with.
"""

import importlib.util
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import yaml

ROOT = pathlib.Path(__file__).resolve().parent.parent
LAUNCH = ROOT / "launch"
SCRIPTS = sorted(LAUNCH.glob("*.sh"))


def load_script(name: str):
    spec = importlib.util.spec_from_file_location(name, LAUNCH / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


gke_jobset = load_script("gke_jobset")


def run(script: str, *arguments: str, **environment: str):
    clean = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
    return subprocess.run(
        ["bash", str(LAUNCH / script), *arguments],
        env=clean | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


def commands(script: str, *arguments: str, **environment: str) -> list[list[str]]:
    """Returns the commands of a dry run, as words."""
    done = run(script, "--dry_run", *arguments, **environment)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("+ ")]
    return [shlex.split(line[2:]) for line in lines]


def stand_in(folder: pathlib.Path, name: str, body: str) -> None:
    """Puts a command on a path of its own; it writes its words to calls.txt first."""
    folder.mkdir(exist_ok=True)
    script = folder / name
    log = shlex.quote(str(folder / "calls.txt"))
    script.write_text(f'#!/bin/bash\necho "{name} $*" >>{log}\n{body}\n')
    script.chmod(0o755)


def on_path(folder: pathlib.Path) -> str:
    return f"{folder}:{os.environ['PATH']}"


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck(script):
    done = subprocess.run(
        ["shellcheck", "-x", str(script.relative_to(ROOT))],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


# --- Cloud TPU ----------------------------------------------------------------------

WHERE = ["--zone=us-west4-a", "--project=p"]
XL = ["--gin_file=gin/st5_xl_mean.gin", "--model_dir=gs://b/xl"]


def test_up_requests_waits_copies_and_installs():
    create, describe, archive, copy, install = commands(
        "tpu_pod.sh", "up", "st5", "--project=p", "--spot",
        "--accelerator_type=v5litepod-64",
    )  # fmt: skip
    queued = ["gcloud", "compute", "tpus", "queued-resources"]
    assert create == [
        *queued, "create", "st5", *WHERE, "--accelerator-type=v5litepod-64",
        "--runtime-version=v2-alpha-tpuv5-lite", "--node-id=st5", "--spot",
    ]  # fmt: skip
    assert describe == [
        *queued,
        "describe",
        "st5",
        *WHERE,
        "--format=value(state.state)",
    ]
    assert archive[:5] == ["git", "-C", str(ROOT), "archive", "--format=tar.gz"]
    file = archive[5].removeprefix("--output=")
    vm = ["gcloud", "compute", "tpus", "tpu-vm"]
    assert copy == [
        *vm, "scp", file, "st5:sentence_t5.tar.gz", *WHERE, "--worker=all",
    ]  # fmt: skip
    assert install[:-1] == [*vm, "ssh", "st5", *WHERE, "--worker=all"]
    assert install[-1].endswith("bash sentence_t5/launch/worker.sh setup")


def test_train_starts_every_worker_of_every_slice():
    found = commands(
        "tpu_pod.sh", "train", "st5", "--num_slices=2", "--project=p", "--",
        *XL, "--gin.T5Config.dtype='float32'",
    )  # fmt: skip
    assert [command[5] for command in found] == ["st5-0", "st5-1"]
    for command in found:
        assert "--worker=all" in command
        remote = command[-1].removeprefix("--command=")
        assert shlex.split(remote) == [
            *["bash", "sentence_t5/launch/worker.sh", "start"],
            *["python", "-m", "sentence_t5.train", "--distributed"],
            *[*XL, "--gin.T5Config.dtype='float32'"],
        ]


def test_several_slices_are_one_request():
    create = commands("tpu_pod.sh", "up", "st5", "--num_slices=4")[0]
    assert create[-2:] == ["--node-count=4", "--node-prefix=st5"]


def test_t5x_runs_on_all_workers_too():
    command = ["python3", "/opt/t5x/train.py", "--gin_file=a.gin", "--gin.A='b c'"]
    (found,) = commands("tpu_pod.sh", "run", "st5", "--", *command)
    remote = shlex.split(found[-1].removeprefix("--command="))
    assert remote[3:] == command


def test_other_verbs():
    (stop,) = commands("tpu_pod.sh", "stop", "st5")
    assert stop[-1] == "--command=bash sentence_t5/launch/worker.sh stop"
    (logs,) = commands("tpu_pod.sh", "logs", "st5", "--num_slices=2")
    assert logs[5] == "st5-0"
    assert "--worker=0" in logs
    (down,) = commands("tpu_pod.sh", "down", "st5")
    assert down[3:6] == ["queued-resources", "delete", "st5"]
    assert down[-2:] == ["--force", "--quiet"]


@pytest.mark.parametrize(
    ("accelerator", "topology"),
    [("v5litepod-64", "v5e:8x8"), ("v6e-16", "v6e:4x4"), ("v5p-128", "v5p:4x4x4")],
)
def test_check_compiles_for_the_slice(accelerator, topology):
    (compiled,) = commands(
        "tpu_pod.sh", "check", "st5", f"--accelerator_type={accelerator}", "--", *XL
    )
    assert compiled[:3] == ["env", "JAX_PLATFORMS=cpu", "TPU_SKIP_MDS_QUERY=1"]
    assert compiled[3:] == [
        *["python", "-m", "sentence_t5.compile", *XL, f"--topology={topology}"]
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "st5", "--", "--model_dir=/tmp/st5"], "each worker's own disk"),
        (["train", "st5", "--", "--model_dir=st5"], "each worker's own disk"),
        (
            ["train", "st5", "--shared_dir=/mnt/a", "--", "--model_dir=/mnt/ab"],
            "each worker's own disk",
        ),
        (["train", "st5", "--", "--gin_file=a"], "expected --model_dir=gs://"),
        (["train", "st5", "--", *XL, "--process_id=0"], "find each other"),
        (["train", "st5"], "train needs arguments after --"),
        (["train", "st5", "--gin_file=a"], "unknown option --gin_file=a"),
        (["up"], "expected a verb and a name"),
        (["fly", "st5"], "there is no verb fly"),
        (["up", "st5", "--num_slices=0"], "expected 1 or more"),
        (["up", "st5", "--accelerator_type=v9-8"], "pass --runtime_version"),
        (
            ["check", "st5", "--accelerator_type=v5p-12", "--", *XL],
            "the shape of v5p-12 is not known",
        ),
    ],
)
def test_tpu_mistakes_are_named(arguments, message):
    done = run("tpu_pod.sh", "--dry_run", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "gcloud" not in done.stdout


def test_a_shared_folder_is_taken():
    (found,) = commands(
        "tpu_pod.sh", "train", "st5", "--shared_dir=/mnt/a/", "--",
        "--model_dir=/mnt/a/st5",
    )  # fmt: skip
    assert "--model_dir=/mnt/a/st5" in found[-1]


GCLOUD = """
case "$4" in
  describe)
    n=$(grep -c describe {calls})
    ((n < 3)) && echo WAITING_FOR_RESOURCES || echo {end}
    ;;
  ssh) [[ "$5" != *-1 ]] || exit {code} ;;
esac
"""


@pytest.mark.parametrize(
    ("end", "code", "expected"), [("ACTIVE", 0, 0), ("ACTIVE", 5, 1), ("FAILED", 0, 1)]
)
def test_up_waits_and_passes_failures_on(tmp_path, end, code, expected):
    calls = tmp_path / "calls.txt"
    stand_in(tmp_path, "gcloud", GCLOUD.format(calls=calls, end=end, code=code))
    done = run(
        "tpu_pod.sh", "up", "st5", "--num_slices=2",
        PATH=on_path(tmp_path), POLL_SECONDS="0", TMPDIR=str(tmp_path),
    )  # fmt: skip
    assert done.returncode == expected, done.stderr
    verbs = [line.split()[4] for line in calls.read_text().splitlines()]
    assert verbs[:4] == ["create", "describe", "describe", "describe"]
    # A request that failed costs nothing more; else both slices are set up.
    assert sorted(verbs[4:]) == (
        [] if end == "FAILED" else ["scp", "scp", "ssh", "ssh"]
    )
    assert ("The request is FAILED" in done.stderr) == (end == "FAILED")


# --- a worker -----------------------------------------------------------------------


@pytest.fixture
def worker(tmp_path):
    """A function that runs worker.sh in a checkout of its own."""
    checkout = tmp_path / "checkout"
    (checkout / "launch").mkdir(parents=True)
    for name in ("worker.sh", "venv.sh"):
        shutil.copy(LAUNCH / name, checkout / "launch")

    def call(*arguments):
        return subprocess.run(
            ["bash", str(checkout / "launch" / "worker.sh"), *arguments],
            env=os.environ | {"WATCH": "1", "PATIENCE": "20"},
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    yield call
    call("stop")


# Saves on SIGTERM, as training does.
SAVES = (
    "trap 'echo saved; exit 143' TERM; echo began \"$0\"; while :; do sleep 0.1; done"
)


def test_worker_starts_once_and_stops(worker):
    assert "nothing runs" in worker("stop").stdout
    started = worker("start", "bash", "-c", SAVES, "a b'c")
    assert started.returncode == 0, started.stderr
    again = worker("start", "true")
    assert again.returncode == 1
    assert "still runs; stop it first" in again.stderr
    stopped = worker("stop")
    assert stopped.returncode == 0
    assert "began a b'c" in stopped.stdout
    assert stopped.stdout.splitlines()[-1] == "saved"
    assert "nothing runs" in worker("stop").stdout


def test_worker_stops_what_a_script_started(worker, tmp_path):
    # Commands one after another, as a sweep prints them.
    script = f"bash -c {shlex.quote(SAVES)}; echo next"
    assert worker("start", "bash", "-c", script).returncode == 0
    stopped = worker("stop")
    assert stopped.returncode == 0
    assert stopped.stdout.splitlines()[-1] == "saved"


def test_worker_says_why_a_start_failed(worker):
    failed = worker("start", "bash", "-c", "echo no such file >&2; exit 3")
    assert failed.returncode == 3
    assert "ended at once with exit code 3" in failed.stderr
    assert "no such file" in failed.stderr


# --- Slurm --------------------------------------------------------------------------


def directives() -> dict[str, str]:
    text = (LAUNCH / "slurm_gpu.sh").read_text()
    # Slurm stops looking at the first command.
    head = text[: text.index("set -euo")]
    lines = re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", head, re.MULTILINE)
    assert len(lines) == text.count("\n#SBATCH")
    return dict(lines)


def test_slurm_asks_for_one_process_per_gpu_and_time_to_save():
    found = directives()
    assert found["gpus-per-node"] == found["ntasks-per-node"]
    # Without "B:" the signal goes to the training processes, not to the script.
    assert re.fullmatch(r"TERM@\d+", found["signal"])
    assert int(found["signal"].split("@")[1]) >= 60
    assert "requeue" in found


def test_slurm_dry_run():
    arguments = ["--gin_file=a.gin", "--model_dir=/shared/a", "--gin.A='b c'"]
    (found,) = commands("slurm_gpu.sh", *arguments, PYTHON="/env/bin/python")
    assert found == [
        *["srun", "--kill-on-bad-exit=1", "/env/bin/python", "-m", "sentence_t5.train"],
        *arguments,
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected flags of training"),
        (["--gin_file=a"], "expected --model_dir"),
        (["--model_dir=/tmp/a"], "each node's own disk; 2 nodes"),
        (["--model_dir=/scratch7/a"], "each node's own disk"),
    ],
)
def test_slurm_mistakes_are_named(arguments, message):
    done = run(
        "slurm_gpu.sh", "--dry_run", *arguments,
        SLURM_JOB_NUM_NODES="2", TMPDIR="/scratch7",
    )  # fmt: skip
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.parametrize(
    ("code", "restarts", "requeued"), [(143, 0, True), (143, 2, False), (1, 0, False)]
)
def test_slurm_goes_back_into_the_queue_when_saved(tmp_path, code, restarts, requeued):
    stand_in(tmp_path, "srun", f"exit {code}")
    stand_in(tmp_path, "scontrol", "")
    done = run(
        "slurm_gpu.sh", "--model_dir=/shared/a",
        PATH=on_path(tmp_path), PYTHON="/bin/true", MAX_RESTARTS="2",
        SLURM_JOB_ID="77", SLURM_RESTART_COUNT=str(restarts),
    )  # fmt: skip
    assert done.returncode == code
    calls = (tmp_path / "calls.txt").read_text().splitlines()
    assert calls[0].startswith(
        "srun --kill-on-bad-exit=1 /bin/true -m sentence_t5.train"
    )
    assert calls[1:] == (["scontrol requeue 77"] if requeued else [])


def test_slurm_outside_of_a_job_is_refused():
    done = run("slurm_gpu.sh", "--model_dir=/shared/a")
    assert done.returncode == 2
    assert "sbatch launch/slurm_gpu.sh" in done.stderr


# --- GKE ----------------------------------------------------------------------------

# The fields that the manifest may have, by the schemas of JobSet v1alpha2, Job v1 and
# Pod v1, with their types. "[]" is a list of what follows, "" any key.
FIELDS = {
    "apiVersion": str, "kind": str,
    "metadata": {"name": str, "annotations": {"": str}},
    "spec": {
        "failurePolicy": {"maxRestarts": int},
        "replicatedJobs": {"[]": {
            "name": str, "replicas": int,
            "template": {"spec": {
                "parallelism": int, "completions": int, "backoffLimit": int,
                "template": {"spec": {
                    "restartPolicy": str, "hostNetwork": bool, "dnsPolicy": str,
                    "terminationGracePeriodSeconds": int, "serviceAccountName": str,
                    "nodeSelector": {"": str},
                    "containers": {"[]": {
                        "name": str, "image": str,
                        "command": {"[]": str}, "args": {"[]": str},
                        "securityContext": {"privileged": bool},
                        "resources": {"limits": {"": int}},
                    }},
                }},
            }},
        }},
    },
}  # fmt: skip


def check_fields(value, fields, path=""):
    if isinstance(fields, type):
        assert type(value) is fields, f"{path} is {value!r}"
    elif "[]" in fields:
        assert isinstance(value, list) and value, path
        for item in value:
            check_fields(item, fields["[]"], f"{path}[]")
    else:
        assert isinstance(value, dict), path
        for key, inner in value.items():
            assert key in fields or "" in fields, f"there is no {path}.{key}"
            check_fields(inner, fields.get(key, fields.get("")), f"{path}.{key}")


def check_manifest(manifest):
    """Checks fields and what they must be to each other."""
    check_fields(manifest, FIELDS)
    assert manifest["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
    assert manifest["kind"] == "JobSet"
    (slices,) = manifest["spec"]["replicatedJobs"]
    job = slices["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    selector = pod["nodeSelector"]
    shape = selector["cloud.google.com/gke-tpu-topology"].split("x")
    names = dict(gke_jobset.ACCELERATORS.values())
    assert len(shape) == names[selector["cloud.google.com/gke-tpu-accelerator"]]
    chips = 1
    for size in shape:
        chips *= int(size)
    assert job["parallelism"] == job["completions"] == chips // 4
    assert container["resources"]["limits"] == {"google.com/tpu": 4}
    # One pod that fails ends its Job; JobSet restarts all of them together.
    assert (job["backoffLimit"], pod["restartPolicy"]) == (0, "Never")
    several = job["parallelism"] * slices["replicas"] > 1
    assert ("--distributed" in container["args"]) == several


def test_the_manifest_itself_is_valid():
    check_manifest(yaml.safe_load((LAUNCH / "gke_jobset.yaml").read_text()))


def test_a_wrong_field_is_found():
    manifest = yaml.safe_load((LAUNCH / "gke_jobset.yaml").read_text())
    manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["parallelizm"] = 4
    with pytest.raises(AssertionError, match=r"template.spec.parallelizm"):
        check_manifest(manifest)


GKE = ["--name=st5", "--image=i/st5:1"]


@pytest.mark.parametrize(
    ("topology", "num_slices", "hosts"),
    [("v5e:2x2", 1, 1), ("v5e:8x8", 2, 16), ("v5p:4x4x4", 1, 16), ("v6e:4x4", 3, 4)],
)
def test_jobset_is_filled_in(capsys, topology, num_slices, hosts):
    arguments = [*XL, "--gin.T5Config.dtype='float32'"]
    code = gke_jobset.main(
        [
            *[*GKE, f"--topology={topology}", f"--num_slices={num_slices}", "--spot"],
            *["--service_account=trainer", "--max_restarts=3", "--", *arguments],
        ]
    )
    assert code == 0
    manifest = yaml.safe_load(capsys.readouterr().out)
    check_manifest(manifest)
    assert manifest["metadata"]["name"] == "st5"
    assert manifest["spec"]["failurePolicy"] == {"maxRestarts": 3}
    (slices,) = manifest["spec"]["replicatedJobs"]
    assert slices["replicas"] == num_slices
    assert slices["template"]["spec"]["parallelism"] == hosts
    pod = slices["template"]["spec"]["template"]["spec"]
    assert pod["nodeSelector"]["cloud.google.com/gke-spot"] == "true"
    assert pod["serviceAccountName"] == "trainer"
    (container,) = pod["containers"]
    assert container["image"] == "i/st5:1"
    assert [word for word in container["args"] if word != "--distributed"] == arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--topology=v9:2x2"], "a chip of v4, v5e, v5p, v6e"),
        (["--topology=v5e-16"], "expected CHIP:SHAPE"),
        (["--topology=v5e:2x2x2"], "2 dimensions"),
        (["--topology=v5e:1x2"], "multiple of 4 chips"),
        (["--topology=v5e:2x2", "--num_slices=2"], "1 for slices of a single host"),
        (["--topology=v5e:4x4", "--name=St5"], "--name=St5"),
        (["--topology=v5e:4x4", "--", "--model_dir=/tmp/a"], "got --model_dir=/tmp/a"),
    ],
)
def test_gke_mistakes_are_named(capsys, arguments, message):
    more = [] if "--" in arguments else ["--", *XL]
    assert gke_jobset.main([*GKE, *arguments, *more]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.out == ""


# --- the page -----------------------------------------------------------------------


def shell_block(title: str, start: str) -> str:
    """Returns the first block of a section of the page that contains a word."""
    section = (LAUNCH / "README.md").read_text().split(f"\n## {title}\n")[1]
    section = section.split("\n## ")[0]
    blocks = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
    return next(block for block in blocks if start in block)


@pytest.mark.parametrize("start", ["tpu_pod.sh up", "tpu_pod.sh run"])
def test_commands_of_the_page_for_cloud_tpu(start):
    block = shell_block("Cloud TPU", start)
    dry = block.replace("tpu_pod.sh ", "tpu_pod.sh --dry_run ")
    done = subprocess.run(
        ["bash", "-euc", dry], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("+ gcloud") >= block.count("tpu_pod.sh ") - 1


def test_commands_of_the_page_for_gke(tmp_path):
    for name in ("docker", "kubectl"):
        stand_in(tmp_path, name, "")
    (tmp_path / "python").symlink_to(sys.executable)
    block = shell_block("GKE", "gke_jobset.py").replace(
        "jobset.yaml", f"{tmp_path}/jobset.yaml"
    )
    done = subprocess.run(
        ["bash", "-euc", block], cwd=ROOT, env=os.environ | {"PATH": on_path(tmp_path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    check_manifest(yaml.safe_load((tmp_path / "jobset.yaml").read_text()))
    assert (tmp_path / "calls.txt").read_text().count("kubectl") == 3


def test_command_of_the_page_for_slurm():
    line = shell_block("Slurm", "sbatch").splitlines()[-1]
    sbatch, nodes, script, *arguments = shlex.split(line)
    assert (sbatch, nodes) == ("sbatch", "--nodes=2")
    (found,) = commands(pathlib.Path(script).name, *arguments, SLURM_JOB_NUM_NODES="2")
    assert found[-2:] == arguments


def test_dockerfile_copies_what_there_is():
    text = (LAUNCH / "Dockerfile").read_text()
    copied = [
        word
        for line in re.findall(r"^COPY (.+) \S+$", text, re.M)
        for word in line.split()
    ]
    assert set(copied) >= {
        "setup.py",
        "requirements.lock",
        "sentence_t5",
        "gin",
        "tasks",
    }
    assert all((ROOT / name).exists() for name in copied)
