"""Scripts are expanded as bash expands them, and nothing that they would start is started."""

import subprocess
import sys
from pathlib import Path

import pytest

from engines.errors import ConfigError
from tuning.doctor.files import shell_script
from tuning.doctor.files.shell_script import is_known, read_script


def script(folder: Path, text: str) -> Path:
    path = folder / "train.sh"
    path.write_text(text, encoding="utf-8")
    return path


def run_words(folder: Path, text: str) -> list[list[str]]:
    """The words of each command `run`."""
    commands = read_script(script(folder, text))
    return [list(command.words[1:]) for command in commands if command.words[0] == "run"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('B=/m; A=${A:-"${B}/x"}\nrun "$A"', ["/m/x"]),
        ("A=${A:-${B:-${C:-3}}}\nrun $A", ["3"]),
        ("P=10; R=6; S=3\nrun $(((P + R) / S)) $(( (P+R)*2 ))", ["5", "32"]),
        ("case ${KIND:-b} in a) N=1;; b) N=2;; *) N=3;; esac\nrun $N", ["2"]),
        ("if [ 4 -gt 8 ]; then N=1; else N=2; fi\nrun $N", ["2"]),
        ("if [[ -z $X ]]; then\n  N=7\nfi\nrun n=$N", ["n=7"]),
        ("start() { run \"$@\" b=2; }\nstart a=1 'c d'", ["a=1", "c d", "b=2"]),
        (
            "ARGS=(\n  a=1\n  # why\n  'b=2 3'\n)\nARGS+=(c=4)\nrun \"${ARGS[@]}\" d=5 $@",
            ["a=1", "b=2 3", "c=4", "d=5"],
        ),
        ("set -euo pipefail\nrun a=1 2>&1 | tee run.log", ["a=1"]),
        ("set -e\nfalse\ncd /nowhere\n/opt/missing/program x\nrun a=1 > run.log", ["a=1"]),
        ("run a=1 \\\r\n  b=2\r\n", ["a=1", "b=2"]),
        ("run a=1 \\\n  # no more\n  b=2\n", ["a=1"]),
        ("X=Model-7B; run ${X##*-} ${X%-*} ${X,,} ${#X}", ["7B", "Model", "model-7b", "8"]),
        ('for lr in 1 2; do A+=" lr=$lr"; done\nrun $A', ["lr=1", "lr=2"]),
        ('run l=\'["a","b"]\' s="it\'s" t=$\'a\\tb\'', ['l=["a","b"]', "s=it's", "t=a\tb"]),
        ("until nvidia-smi >/dev/null 2>&1; do sleep 2; done\nrun a=1", ["a=1"]),
        ("eval 'run a=$((1+1))'", ["a=2"]),
    ],
)
def test_words_are_those_that_bash_gives_a_program(tmp_path: Path, text: str, words: list[str]) -> None:
    assert run_words(tmp_path, text) == [words]


def test_words_are_those_that_a_program_really_gets(tmp_path: Path) -> None:
    """The reference is a program that prints its arguments, started by an unrestricted bash."""
    text = (
        "A=(x 'y  z' \"q'q\" '$HOME' $'n\\nn' 'ü' '*')\n\"$PROGRAM\" -c 'import sys; print(sys.argv[1:])' \"${A[@]}\"\n"
    )
    path = script(tmp_path, text)
    done = subprocess.run(
        ["bash", path], env={"PROGRAM": sys.executable}, capture_output=True, text=True, check=True, timeout=30
    )
    (command,) = [one for one in read_script(path) if "-c" in one.words]
    assert repr(list(command.words[command.words.index("-c") + 2 :])) == done.stdout.strip()


def test_nothing_of_a_script_is_started_and_no_file_is_written(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("here", encoding="utf-8")
    path = script(
        tmp_path,
        f"rm -f {kept}\n/bin/rm -f {kept}\n: > {kept}\nPATH=/bin:/usr/bin\nexport PATH=/bin\nexec /bin/rm {kept}\n"
        f"command /bin/rm {kept}\nenable kill\nkill -9 $PPID\nbuiltin kill -9 $PPID\nset +r\nrm {kept}\n"
        f"echo x >> {kept}\n"
        f"history -w {kept}\nprintf x | /bin/tee {kept}\nrun a=1\n",
    )
    assert [one.words for one in read_script(path) if one.words[0] == "run"] == [("run", "a=1")]
    assert kept.read_text(encoding="utf-8") == "here"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["kept", "train.sh"]


def test_an_output_of_a_command_stands_as_its_name_and_is_not_known(tmp_path: Path) -> None:
    (words,) = run_words(tmp_path, "N=$(nvidia-smi -L | wc -l)\nrun n=$N d=$(dirname /a/b) b=$(basename /a/b.sh .sh)")
    assert words == ["n=$(wc)", "d=/a", "b=b"]
    assert [is_known(word) for word in words] == [False, True, True]


def test_a_script_that_never_ends_is_read_up_to_a_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell_script, "_TIMEOUT_S", 1.0)
    found = read_script(script(tmp_path, "run a=1\nwhile true; do :; done\n"))
    assert ("run", "a=1") in [command.words for command in found]


def test_a_script_that_opens_connections_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="opens network connections"):
        read_script(script(tmp_path, "exec 3</dev/tcp/127.0.0.1/1\n"))


def test_a_script_sees_the_folder_that_it_was_read_from(tmp_path: Path) -> None:
    (words,) = run_words(tmp_path, 'run "$(dirname "${BASH_SOURCE[0]}")/config" "$PWD"')
    assert words == [f"{tmp_path}/config", str(tmp_path)]


def test_arguments_stand_for_themselves(tmp_path: Path) -> None:
    path = script(tmp_path, ': "${2:?usage}"\nshift 1\nrun a=$1\n')
    assert [one for one in read_script(path) if one.words[0] == "run"] == []
    (command,) = [one for one in read_script(path, "$1", "$2") if one.words[0] == "run"]
    assert command.words == ("run", "a=$2")
