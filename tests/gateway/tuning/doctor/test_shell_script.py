"""Scripts are read as a shell would read them, and nothing of them is run."""

from gateway.tuning.doctor.files.shell_script import read_commands


def words(text: str) -> list[list[str]]:
    return [[word.text for word in command.words] for command in read_commands(text)]


def test_a_backslash_continues_a_command_and_each_word_has_its_line() -> None:
    (command,) = read_commands("run a=1 \\\n  b=2 \\\r\n  c=3\n")
    assert [(word.text, word.line) for word in command.words] == [("run", 1), ("a=1", 1), ("b=2", 2), ("c=3", 3)]


def test_quotes_keep_words_together_and_are_left_out() -> None:
    assert words("""run a="b c"'d "e"' 'f'\\ g""") == [["run", 'a=b cd "e"', "f g"]]


def test_comments_end_at_the_line_and_begin_a_word_only() -> None:
    assert words("run a#b # c d\ne") == [["run", "a#b"], ["e"]]


def test_a_comment_or_an_empty_line_ends_a_continued_command() -> None:
    assert words("run a=1 \\\n # b\n c=2") == [["run", "a=1"], ["c=2"]]
    assert words("run a=1 \\\n   \n c=2") == [["run", "a=1"], ["c=2"]]


def test_a_blank_after_the_backslash_ends_it_too() -> None:
    assert words("run a=1 \\ \nb=2")[1] == ["b=2"]


def test_variables_are_filled_in_where_the_script_sets_them() -> None:
    script = "export A=1\nB=${A}2; run x=$B y=\"$A-$C\" z='$A' d=${D:-9} e=${A:-9}"
    assert words(script)[-1] == ["run", "x=12", "y=1-$C", "z=$A", "d=9", "e=1"]


def test_arithmetic_on_known_numbers_is_done() -> None:
    assert words("P=1024; R=4096\nrun n=$((P + R * 2)) m=$(($P / 3)) u=$((Q + 1))")[-1] == [
        "run",
        "n=9216",
        "m=341",
        "u=$((Q + 1))",
    ]


def test_what_only_a_shell_could_know_stays_as_it_stands() -> None:
    assert words("run a=$(hostname -f) b=$HOME/x c=$1") == [["run", "a=$(hostname -f)", "b=$HOME/x", "c=$1"]]


def test_an_arrays_words_are_a_list_and_its_use_is_empty() -> None:
    first, second = read_commands('ARGS=(\n  a.b=1\n  # why\n  c.d="2 3"\n)\nrun "${ARGS[@]}" e=1 "$@"')
    assert first.is_list
    assert [word.text for word in first.words] == ["a.b=1", "c.d=2 3"]
    assert [word.text for word in second.words if word.text] == ["run", "e=1"]


def test_an_end_that_never_comes_is_the_files_end() -> None:
    assert words("run 'a") == [["run", "a"]]
    assert words('run "a $(b') == [["run", "a $(b"]]
