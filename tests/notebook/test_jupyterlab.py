"""The notebooks in JupyterLab, in a real browser, as a person runs them: all cells, to their end.

Where CHORUSLINE_PICTURES names a folder, the pictures of the pages are written there:

    CHORUSLINE_PICTURES=docs/images python -m pytest -m slow tests/notebook/test_jupyterlab.py
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
import ray

from tests import ROOT
from tests.harness.browser import Browser, jupyterlab, missing
from tests.repository.documentation.test_quickstart import PROGRAM

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(missing()), reason=f"there is no {', no '.join(missing())}"),
]

PICTURES = {
    ("first_steps", 2): ("jupyterlab_first_steps", "node"),
    ("killed_worker", 2): ("killed_worker", "node"),
    ("many_numbers", 1): ("jupyterlab_numbers", "outputArea.node"),
    ("many_numbers", 2): ("jupyterlab_ranks", "node"),
    ("quickstart", 2): ("jupyterlab_quickstart", "node"),
}
"""By notebook and number of a cell: the picture's name, and what it shows of the cell."""

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))

MANY_NUMBERS = [
    "import chorusline as cl\n%load_ext chorusline\n"
    "session = await cl.Session(num_workers=2).start()",
    """import time, torch

def train(ctx, epochs):
    torch.manual_seed(0)
    model = cl.DistributedDataParallel(torch.nn.Linear(8, 2))
    optim = cl.ZeroRedundancyOptimizer(model, torch.optim.AdamW, lr=3e-2, max_norm=10.0)
    x = torch.randn(600, 8, generator=torch.Generator().manual_seed(1))
    y = (x.sum(1) > 0).long()
    data = torch.utils.data.TensorDataset(x, y)
    for epoch in ctx.epochs(epochs):
        with cl.Join([model, optim]):
            for inputs, labels in ctx.shard(data, 16, epoch=epoch):
                loss = torch.nn.functional.cross_entropy(model(inputs), labels)
                loss.backward()
                optim.step()
                optim.zero_grad()
                ctx.report(loss=loss, gradient_norm=optim.grad_norm, samples=len(labels))
                time.sleep(0.03)
        right = samples = 0
        with torch.no_grad():
            for inputs, labels in ctx.shard(data, 50, shuffle=False):
                right += (model.module(inputs).argmax(1) == labels).sum().item()
                samples += len(labels)
        accuracy = ctx.reduce(right, "sum") / ctx.reduce(samples, "sum")
        if ctx.rank == 0:
            ctx.report(accuracy=accuracy)
            print(f"epoch {epoch}: accuracy {accuracy:.3f}")

await session.run(train, epochs=8);""",
    """%%ranks
import matplotlib.pyplot as plt
torch.manual_seed(ctx.rank)
print("rank", ctx.rank, "draws")
if ctx.rank == 0:
    plt.figure(figsize=(4, 2))
    plt.hist(torch.randn(1000).numpy(), bins=30)
    plt.show()
ctx.world_size""",
    "await session.close()",
]
"""The cells of a notebook that reports several numbers, and plots on a rank."""

QUICKSTART = [
    f"%%writefile train.py\n{PROGRAM}",
    "!python train.py --epochs 1",
    "import chorusline as cl\nfrom train import train\n"
    "session = await cl.Session(num_workers=2).start()\nawait session.run(train, epochs=2)",
    "await session.close()",
]
"""The program of docs/getting-started.md: as a script, and its function in the notebook."""

RUN_ALL = """
const app = window.jupyterapp;
const panel = [...app.shell.widgets('main')].find(one => one.content && one.content.widgets);
await panel.revealed; await panel.sessionContext.ready;
return await app.commands.execute('notebook:run-all-cells');
"""
IS_READY = """
const app = window.jupyterapp;
const panel = app && [...app.shell.widgets('main')].find(one => one.content && one.content.widgets);
return !!panel && panel.sessionContext.isReady && panel.content.widgets.length > 1;
"""
OUTPUTS = """
const panel = [...window.jupyterapp.shell.widgets('main')].find(
    one => one.content && one.content.widgets);
return panel.content.widgets.filter(cell => cell.model.type === 'code').map(cell => ({
    count: cell.model.executionCount,
    outputs: cell.model.sharedModel.getOutputs(),
}));
"""
CELL = """
const panel = [...window.jupyterapp.shell.widgets('main')].find(
    one => one.content && one.content.widgets);
const cells = panel.content.widgets.filter(cell => cell.model.type === 'code');
panel.content.scrollToItem(panel.content.widgets.indexOf(cells[{number}]), 'start');
return cells[{number}].{part};
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    browser = Browser()
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def lab(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    folder = tmp_path_factory.mktemp("lab")
    for path in NOTEBOOKS:
        shutil.copy(path, folder)
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    for name, sources in (("many_numbers", MANY_NUMBERS), ("quickstart", QUICKSTART)):
        cells = [nbformat.v4.new_code_cell(source) for source in sources]
        notebook = nbformat.v4.new_notebook(cells=cells, metadata=kernel)
        nbformat.write(notebook, folder / f"{name}.ipynb")
    gcs = ray.get_runtime_context().gcs_address
    with jupyterlab(folder, RAY_ADDRESS=gcs, RAY_AUTH_MODE="disabled") as address:
        yield address, folder


@pytest.mark.parametrize("name", [*(path.stem for path in NOTEBOOKS), "many_numbers", "quickstart"])
def test_a_notebook_runs_in_a_browser(
    lab: tuple[str, Path], browser: Browser, name: str, tmp_path: Path
) -> None:
    address, _ = lab
    browser.open(f"{address}/lab/workspaces/{name}/tree/{name}.ipynb?reset")
    browser.wait_until(IS_READY)
    browser.run(
        "const app = window.jupyterapp; app.shell.collapseLeft();"
        "app.commands.execute('statusbar:toggle');"
    )
    ran = browser.run(RUN_ALL)
    cells = browser.run(OUTPUTS)
    errors = [one for cell in cells for one in cell["outputs"] if one["output_type"] == "error"]
    assert not errors and ran is not False
    assert all(cell["count"] for cell in cells), "every cell has run"
    folder = Path(os.environ.get("CHORUSLINE_PICTURES", tmp_path)).absolute()
    for (of, number), (picture, part) in PICTURES.items():
        for width, kind in ((560, "-narrow"), (1100, "")) if of == name else ():
            browser.resize(width, 2600)
            browser.run(CELL.format(number=number, part="node && null"))
            browser.wait_until(CELL.format(number=number, part="outputArea.node.isConnected"))
            drawn = browser.picture(CELL.format(number=number, part=part))
            (folder / f"{picture}{kind}.png").write_bytes(drawn)
    browser.run("return window.jupyterapp.commands.execute('docmanager:save')")
    svgs = browser.run("return document.querySelectorAll('svg[aria-label]').length")
    assert svgs > 0 or "text/html" not in str(cells)
