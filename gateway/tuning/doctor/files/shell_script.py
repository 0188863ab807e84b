"""The words of a shell script, read and never run: quotes, continued lines, comments, variables and arithmetic.

What only a running shell could know, such as `$(...)` and variables from outside, is left as it stands.
"""

import ast
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, field

_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_ENDS_COMMAND = ";|&"
_OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
    ast.FloorDiv: operator.floordiv,
}


@dataclass(frozen=True, slots=True)
class Word:
    """As the command sees it, and its line."""

    text: str
    line: int


@dataclass(slots=True)
class Command:
    """`is_list` marks what stands between parentheses, such as a bash array."""

    words: list[Word] = field(default_factory=list)
    is_list: bool = False


def read_commands(text: str) -> list[Command]:
    return _Reader(text).read()


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._line = 1
        self._variables: dict[str, str] = {}
        self._commands: list[Command] = []
        self._command = Command()
        self._depth = 0
        self._word: str | None = None
        self._word_line = 1

    def read(self) -> list[Command]:
        while self._at < len(self._text):
            self._step(self._text[self._at])
        self._end_command()
        return self._commands

    def _step(self, char: str) -> None:
        if char == "\\":
            self._escape()
        elif char == "\n":
            self._end_word()
            if not self._depth:
                self._end_command()
            self._skip(1)
        elif char in " \t\r":
            self._end_word()
            self._skip(1)
        elif char == "#" and self._word is None:
            end = self._text.find("\n", self._at)
            self._at = len(self._text) if end < 0 else end
        elif char == "'":
            end = self._find("'", self._at + 1)
            self._add(self._text[self._at + 1 : end])
            self._skip(end + 1 - self._at)
        elif char == '"':
            self._double_quoted()
        elif char == "$":
            self._add(self._expansion())
        elif char in "()":
            self._parenthesis(char)
        elif char in _ENDS_COMMAND:
            self._end_command()
            self._skip(1)
        else:
            self._add(char)
            self._skip(1)

    def _escape(self) -> None:
        following = self._text[self._at + 1 : self._at + 2]
        if self._text[self._at + 1 : self._at + 3] == "\r\n":
            self._skip(1)  # an editor of Windows; the line goes on all the same
        elif following != "\n":
            self._add(following)
        self._skip(2)

    def _double_quoted(self) -> None:
        self._add("")
        self._skip(1)
        while self._at < len(self._text) and self._text[self._at] != '"':
            char = self._text[self._at]
            following = self._text[self._at + 1 : self._at + 2]
            if char == "\\" and following in ('"', "\\", "$", "`", "\n"):
                self._add("" if following == "\n" else following)
                self._skip(2)
            elif char == "$":
                self._add(self._expansion())
            else:
                self._add(char)
                self._skip(1)
        self._skip(1)

    def _expansion(self) -> str:
        """What stands for the `$...` here, which is passed over."""
        start, rest = self._at, self._text[self._at + 1 :]
        if rest.startswith("(("):
            end = self._find("))", start) + 2
            value = self._arithmetic(self._text[start + 3 : end - 2])
        elif rest.startswith("("):
            end, value = self._find(")", start) + 1, None
        elif rest.startswith("{"):
            end = self._find("}", start) + 1
            value = self._braced(self._text[start + 2 : end - 1])
        elif name := _NAME.match(rest):
            end, value = start + 1 + name.end(), self._variables.get(name[0])
        else:
            end, value = start + 2, "" if rest[:1] in ("@", "*") else None
        self._skip(end - start)
        return self._text[start:end] if value is None else value

    def _braced(self, inside: str) -> str | None:
        name, found, default = re.match(r"(\w*(?:\[[@*]\])?)(:?[-=])?(.*)", inside, re.DOTALL).groups()  # type: ignore[union-attr]
        if name.endswith(("[@]", "[*]")):
            return ""  # the array's words were read where it is made
        if name in self._variables:
            return self._variables[name]
        return _Reader(default)._expanded() if found else None

    def _expanded(self) -> str:
        commands = self.read()
        return " ".join(word.text for command in commands for word in command.words)

    def _arithmetic(self, text: str) -> str | None:
        plain = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda found: self._variables.get(found[1], found[0]), text)
        try:
            return str(_computed(ast.parse(plain.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError):
            return None

    def _parenthesis(self, char: str) -> None:
        if char == "(":
            if self._word is not None and self._word.endswith("="):
                self._word = None  # NAME=(: the name is no word of the list
            self._end_command()
            self._depth += 1
            self._command.is_list = True
        else:
            self._end_command()
            self._depth = max(0, self._depth - 1)
        self._skip(1)

    def _add(self, text: str) -> None:
        if self._word is None:
            self._word, self._word_line = "", self._line
        self._word += text

    def _end_word(self) -> None:
        if self._word is not None:
            self._command.words.append(Word(self._word, self._word_line))
            self._word = None

    def _end_command(self) -> None:
        self._end_word()
        if self._command.words:
            self._assign()
            self._commands.append(self._command)
        self._command = Command(is_list=self._depth > 0)

    def _assign(self) -> None:
        for word in self._command.words:
            if word.text in ("export", "local", "readonly", "declare"):
                continue
            found = _ASSIGNMENT.fullmatch(word.text)
            if found is None:
                return
            self._variables[found[1]] = found[2]

    def _find(self, what: str, start: int) -> int:
        found = self._text.find(what, start)
        return len(self._text) if found < 0 else found

    def _skip(self, count: int) -> None:
        self._line += self._text.count("\n", self._at, self._at + count)
        self._at += count


def _computed(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_computed(node.left), _computed(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_computed(node.operand)
    raise ValueError("no arithmetic on whole numbers")
