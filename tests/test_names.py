"""What a person sees at a prompt: the public names, help, tooltips, and answers to a wrong spelling."""

import inspect
import pydoc
import re
import subprocess
import sys

import pytest

import topovq

CLASSES = [getattr(topovq, name) for name in topovq.__all__ if inspect.isclass(getattr(topovq, name))]


def test_dir_is_the_public_names():
    assert dir(topovq) == sorted([*topovq.__all__, "__version__"])


def test_help_begins_with_every_public_name_and_describes_no_other():
    text = pydoc.plain(pydoc.render_doc(topovq))
    overview = text[: text.index("PACKAGE CONTENTS")]
    assert [name for name in topovq.__all__ if not re.search(rf"\b{name}\b", overview)] == []
    parts = dict(re.findall(r"^([A-Z ]+)\n((?: .*\n|\n)*)", text, re.MULTILINE))
    assert set(parts) == {"NAME", "DESCRIPTION", "PACKAGE CONTENTS", "CLASSES", "FUNCTIONS", "VERSION", "FILE"}
    assert set(re.findall(r"^    class (\w+)", parts["CLASSES"], re.MULTILINE)) == {cls.__name__ for cls in CLASSES}
    functions = set(re.findall(r"^    (\w+)\(", parts["FUNCTIONS"], re.MULTILINE))
    assert functions == {name for name in topovq.__all__ if inspect.isfunction(getattr(topovq, name))}


def test_without_scikit_learn_help_leaves_the_estimators_out():
    code = (
        "import sys; sys.modules['sklearn'] = None; import pydoc, topovq; pydoc.render_doc(topovq); print(dir(topovq))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "KohonenVQ" in done.stdout
    assert "SelfOrganizingMap" not in done.stdout


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_tooltips_are_ours(cls):
    """A notebook's tooltip has the signature, the class's docstring and, if it is not object's, the constructor's."""
    names = list(inspect.signature(cls).parameters)
    assert "args" not in names
    assert inspect.getdoc(cls) not in (None, inspect.getdoc(cls.__mro__[1]))
    told = inspect.getdoc(cls.__init__)
    assert told is None or told == object.__init__.__doc__ or "class" in told, told


def test_the_other_spelling_of_neighborhood_is_answered():
    for cls in (topovq.KohonenVQ, topovq.GradientVQ, topovq.SoftKohonenVQ, topovq.ResidualVQ, topovq.GroupedResidualVQ):
        several = {"num_quantizers": 2} if "Residual" in cls.__name__ else {}
        with pytest.raises(TypeError, match=r"neighbourhood='hard' .*did you mean 'neighborhood'\?"):
            cls(4, 16, neighbourhood="hard", **several)
    with pytest.raises(TypeError, match=r"SelfOrganizingMap: neighbourhood=.*did you mean 'neighborhood'\?"):
        topovq.SelfOrganizingMap((2, 3), neighbourhood="hard")


def test_a_name_that_is_not_there_gets_pythons_suggestion():
    with pytest.raises(AttributeError, match="has no attribute 'Neighbourhood'") as raised:
        topovq.Neighbourhood  # noqa: B018
    assert (raised.value.name, raised.value.obj) == ("Neighbourhood", topovq)  # what "Did you mean" is made of
