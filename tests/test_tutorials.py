"""The hook that executes the tutorials of the docs, where the docs extra is installed."""

import importlib.util
import socket
from pathlib import Path

import pytest

pytest.importorskip("jupytext")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("mkdocs")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of jupyter's own

PAGE = """# %% [markdown]
# # Title
# [a link](../index.md)

# %%
print("once")

# %%
1 + 1
"""


@pytest.fixture(scope="module")
def notebooks():
    specification = importlib.util.spec_from_file_location("notebooks", Path(__file__).parents[1] / ".ci/notebooks.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_a_page_holds_what_its_cells_print(notebooks):
    page, figures = notebooks.rendered(notebooks.executed(PAGE), "example")
    assert "# Title\n[a link](../index.md)" in page
    assert 'print("once")\n```\n\n```text title="output"\nonce\n```' in page
    assert '1 + 1\n```\n\n```text title="output"\n2\n```' in page
    assert figures == {}


def test_a_figure_is_a_file_beside_the_page(notebooks):
    page, figures = notebooks.rendered(
        notebooks.executed("# %%\nimport matplotlib.pyplot as p\n_ = p.plot([1])\n"), "f"
    )
    assert "](f_1.png)" in page
    assert figures["f_1.png"].startswith(b"\x89PNG")


def test_a_committed_page_is_stale_where_its_program_or_its_figures_changed(notebooks, tmp_path, monkeypatch):
    assert notebooks.main(check=True) == 0
    monkeypatch.setattr(notebooks, "TUTORIALS", tmp_path)
    program = tmp_path / "example.py"
    program.write_text(PAGE + "\n# %%\nimport matplotlib.pyplot as p\n_ = p.plot([1])\n")
    assert notebooks.main(check=True) == 1, "there is no page"
    assert notebooks.main(check=False) == notebooks.main(check=True) == 0
    page, figure = tmp_path / "example.md", tmp_path / "example_1.png"
    assert "(example.py)" in page.read_text()
    drawn = figure.read_bytes()
    assert notebooks.main(check=False) == 0
    assert figure.read_bytes() == drawn
    program.write_text(program.read_text().replace("1 + 1", "1 + 2"))
    assert notebooks.main(check=True) == 1
    program.write_text(program.read_text().replace("1 + 2", "1 + 1"))
    figure.unlink()
    assert notebooks.main(check=True) == 1


def test_a_cell_that_raises_ends_the_build(notebooks):
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="no such thing"):
        notebooks.executed("# %%\nraise ValueError('no such thing')\n")


@pytest.mark.parametrize("told", ["__import__('os').getcwd()", "__import__('pathlib').Path.home() / 'x'"])
def test_folders_of_the_machine_are_not_published(notebooks, told):
    with pytest.raises(ValueError, match="which is this machine's"):
        notebooks.executed(f"# %%\nprint({told})\n")


def test_the_name_of_the_machine_is_not_published(notebooks, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "a-very-own-name")
    with pytest.raises(ValueError, match="a-very-own-name"):
        notebooks.executed("# %%\nprint('on a-very-own-name')\n")
