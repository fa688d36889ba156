"""Turn docstrings into Markdown: doctests become code blocks, Sphinx roles become names."""

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:func|class|meth|mod|data):`~?([^`]+)`")
DOCTEST = re.compile(r"^( *)>>> .*(?:\n(?! *$) *.*)*", re.MULTILINE)
PAPER = re.compile(r"^(Paper|Beyond the paper): ", re.MULTILINE)
EQUATION = re.compile(r"(?<=\n\n)((?:y|z|x_hat|mean) = .+)(?=\n\n|\Z)")


class Markdown(griffe.Extension):
    """Rewrite each docstring before mkdocstrings parses it."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of one object, such as a class or a function."""
        if obj.docstring:
            obj.docstring.value = to_markdown(obj.docstring.value)


def to_markdown(text: str) -> str:
    """Return a docstring as Markdown: doctests and equations become code, roles become names, and labels are bold.

    The labels are "Paper" and "Beyond the paper".
    """
    text = ROLE.sub(r"`\1`", text)
    text = EQUATION.sub(r"`\1`", text)
    text = DOCTEST.sub(lambda found: f"{found[1]}```pycon\n{found[0]}\n{found[1]}```", text)
    return PAPER.sub(r"**\1**: ", text)
