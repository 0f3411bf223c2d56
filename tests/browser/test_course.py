"""The course in JupyterLab in Chromium: every notebook by Run All; 00, 01, 06 and 09 used as a reader uses them.

Each test here runs its notebook to the end, looks whether every figure and widget is drawn, and takes pictures. CI runs
the four that are used; the others are marked slow and run by `make test-browser ARGS=--all`.
"""

import re
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("playwright")
ml_dtypes = pytest.importorskip("ml_dtypes")

from playwright.sync_api import expect  # noqa: E402

pytestmark = [pytest.mark.browser, pytest.mark.timeout(1200)]
USED = ("00_quickstart", "01_numbers", "06_mismatch", "09_layer_fallback")
ROOT = Path(__file__).resolve().parents[2]
OTHERS = sorted({path.stem for path in (ROOT / "notebooks").glob("*.ipynb")} - set(USED))
ARMS = {"bf16": "BF16", "fp8-rollout": "FP8 rollout only", "fp8-e2e": "FP8 end to end"}


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_runs_and_is_drawn(name, open_notebook):
    notebook = open_notebook(name)
    notebook.run_all()
    assert notebook.page.locator(".js-plotly-plot").count() > 0
    notebook.shot()


def drag_to_end(notebook, panel, label):
    """Move a slider to its right end with the keyboard."""
    slider = panel.locator(".widget-slider", has_text=label)
    slider.locator(".noUi-handle").focus()
    notebook.page.keyboard.press("End")
    return slider.locator(".widget-readout")


def contrast(page):
    """WCAG's contrast of a figure's title with the page behind it, from 1 to 21."""
    colors = page.evaluate(
        """() => [getComputedStyle(document.querySelector('.js-plotly-plot .gtitle')).fill,
                  getComputedStyle(document.querySelector('.jp-Notebook')).backgroundColor]"""
    )
    luminances = []
    for color in colors:
        channels = np.array([float(part) for part in re.findall(r"[\d.]+", color)[:3]]) / 255
        linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
        luminances.append(float(linear @ [0.2126, 0.7152, 0.0722]) + 0.05)
    return max(luminances) / min(luminances)


def test_00_toggles_stop_reload_and_attach(open_notebook):
    notebook = open_notebook("00_quickstart")
    notebook.run_all()
    panel, page = notebook.output("panel"), notebook.page
    button = lambda text: panel.locator("button", has_text=text)  # noqa: E731
    assert [notebook.points(f"{arm}/mismatch") for arm in ARMS] == [3, 3, 3]

    # A long run of one arm, with its last layers in BF16: a new curve, while the cell that waits is busy.
    for arm in ("bf16", "fp8-e2e"):
        button(ARMS[arm]).click()
    expect(drag_to_end(notebook, panel, "steps")).to_have_text("100")
    expect(drag_to_end(notebook, panel, "last layers BF16")).to_have_text("4")
    notebook.start("run")
    curve = "fp8-rollout, last 4 in BF16/mismatch"
    expect(button("Stop")).to_be_enabled()
    expect(button("Run")).to_be_disabled()
    notebook.wait_points(curve, "> 3")
    notebook.shot("running")
    button("Stop").click()
    expect(panel.get_by_text("Stopped after")).to_be_visible()
    expect(button("Run")).to_be_enabled()
    drawn = len(notebook.ask("[row['step'] for row in panel.runs['fp8-rollout, last 4 in BF16'] if row['step']]"))
    assert 3 < drawn < 100, "it was stopped on the way"
    notebook.wait_points(curve, f"=== {drawn}")
    notebook.no_cell_error()
    assert not notebook.ask("panel.running")
    assert [notebook.points(f"{arm}/mismatch") for arm in ARMS] == [3, 3, 3], "arms that were not chosen stay"

    # An arm of one's own: what it is, or why it cannot run, is said at once.
    own = panel.locator(".jupyter-widget-Collapse", has_text="Your own arm")
    own.locator(".jupyter-widget-Collapse-header").click()
    choose = lambda label, n=0: own.locator(".widget-dropdown", has_text=label).nth(n).locator("select")  # noqa: E731
    choose("weights").select_option("E4M3")
    choose("scale rule").select_option("deepgemm")
    expect(own.locator("code")).to_contain_text("deepgemm")
    choose("correction").select_option("none")
    expect(own.get_by_text("This arm cannot run")).to_be_visible()
    notebook.shot("own arm refused")
    own.locator("label", has_text="an ablation").locator("input").check()
    expect(own.locator("code")).to_contain_text("correction none")
    notebook.shot("own arm")
    own.locator(".jupyter-widget-Collapse-header").click()

    assert contrast(page) > 3
    page.evaluate("() => window.jupyterapp.commands.execute('apputils:change-theme', {theme: 'JupyterLab Dark'})")
    page.wait_for_function("() => document.body.dataset.jpThemeLight === 'false'")
    assert contrast(page) > 3
    notebook.shot("dark")
    page.evaluate("() => window.jupyterapp.commands.execute('apputils:change-theme', {theme: 'JupyterLab Light'})")
    page.wait_for_function("() => document.body.dataset.jpThemeLight === 'true'")

    # A reload keeps the kernel: the panel is shown again as it was, and works.
    notebook.open()
    notebook.write("reload", "panel")
    again = notebook.run("reload")
    notebook.wait_points(curve, f"=== {drawn}")
    expect(again.locator(".widget-readout").first).to_have_text("100")
    expect(again.locator("button.mod-active")).to_have_count(1)
    again.locator("button", has_text=ARMS["fp8-rollout"]).click()
    again.locator("button", has_text="Run").click()
    expect(again.locator("b", has_text="no precision is chosen")).to_be_visible()

    # A restart loses the kernel: the curves come back from the run folders.
    home = notebook.ask("str(panel.runner.home)")
    notebook.stop_kernel()
    notebook.open()
    notebook.write("reload", f"from fp8lab.ui.panels import RunPanel\nRunPanel.from_runs({home!r})")
    notebook.run("reload")
    for name, count in ((curve, drawn), *((f"{arm}/mismatch", 3) for arm in ARMS)):
        notebook.wait_points(name, f"=== {count}")
    notebook.shot("attached")


def test_01_bits_are_clicked(open_notebook):
    notebook = open_notebook("01_numbers")
    notebook.run_all()
    explorer = notebook.output("explorer")
    bits = explorer.locator("button.widget-toggle-button", has_text=re.compile(r"^\s*[01]\s*$"))
    expect(bits).to_have_count(8)
    shown = explorer.locator("pre")

    def check(code, kind):
        expect(shown).to_contain_text(f"0x{code:02x} =")
        value = float(np.uint8(code).view(kind))
        text = shown.inner_text()
        if not np.isfinite(value):
            assert "no number" in text
            return
        assert float(re.search(r"= [+-]2\^\S+ x .* = (\S+) ", text)[1]) == value, text

    code = 0x38
    check(code, ml_dtypes.float8_e4m3fn)
    for name, kind in (("E5M2", ml_dtypes.float8_e5m2), ("E4M3", ml_dtypes.float8_e4m3fn)):
        explorer.locator("button", has_text=name).click()
        for place in (0, 7, 5, 6, 1, 4, 3, 2):
            bits.nth(place).click()
            code ^= 0x80 >> place
            check(code, kind)
    for text, by in (("larger", 1), ("larger", 1), ("smaller", -1)):
        explorer.locator("button", has_text=text).click()
        code += by
        check(code, ml_dtypes.float8_e4m3fn)
    notebook.shot()


def test_06_a_guess_an_answer_and_a_figure(open_notebook):
    notebook = open_notebook("06_mismatch")
    notebook.run_all()
    notebook.shot()
    expect(notebook.output("engines-compare")).to_contain_text("you predicted: (nothing yet)")
    guess = "more than thirty times larger"
    notebook.output("engines-predict").get_by_text(guess, exact=True).click()
    expect(notebook.output("engines-predict")).to_contain_text(f"Noted: {guess}")
    expect(notebook.run("engines-compare")).to_contain_text(f"you predicted: {guess}")

    expect(notebook.output("ex2")).to_contain_text("not yet")
    notebook.write("ex2", "sigma = 0.061\nexercises.check_scatter(sigma)")
    expect(notebook.run("ex2")).to_contain_text("solved")
    culprit = notebook.ask("next(iter(diagnostics.stale_layers(model, mystery.model)))")
    notebook.write("ex3", f"exercises.check_culprit(model, mystery.model, {culprit!r})")
    expect(notebook.run("ex3")).to_contain_text("solved")

    # A name in the legend hides its bars; what stays has the colour of its arm.
    bars = notebook.output("scored").locator(".barlayer .trace, .scatterlayer .trace")
    before = bars.count()
    assert before >= len(ARMS)
    notebook.output("scored").locator(".legendtoggle").first.click()
    expect(bars).to_have_count(before - 1)
    notebook.shot("used")


def test_09_layers_are_clicked_and_measured(open_notebook):
    notebook = open_notebook("09_layer_fallback")
    notebook.run_all()
    panel, page = notebook.output("panel"), notebook.page
    cells, rows = panel.locator(".fp8lab-map .cell"), panel.locator("table tr")
    modules = notebook.ask(
        "[name for name, part in model.named_modules() if '.layers.' in name and hasattr(part, 'in_features')]"
    )
    expect(cells).to_have_count(len(modules))
    expect(rows).to_have_count(1 + 3)
    in_layer = len(modules) // 4
    rollout = lambda fp8: expect(panel).to_contain_text(f"rollout: {fp8} of {len(modules)} in FP8")  # noqa: E731
    rollout(len(modules) - in_layer)
    halves = lambda name: cells.and_(page.locator(f'[data-layer="{name}"]')).locator("span")  # noqa: E731

    # Clicks on the names of two rows make the plan that a cell of the notebook measured as its second try.
    panel.get_by_role("button", name="toggle layer 3").click()
    rollout(len(modules))
    panel.get_by_role("button", name="toggle layer 0").click()
    rollout(len(modules) - in_layer)
    expect(halves(modules[0])).to_have_class(["bf16", "bf16"])
    expect(halves(modules[-1])).to_have_class(["fp8", "bf16"])
    panel.locator("button", has_text="Measure").click()
    expect(rows).to_have_count(1 + 4)
    tries = [line.split("\t") for line in rows.all_inner_texts()[1:]]
    assert tries[3][1:6] == tries[1][1:6] and tries[3][3] == "25.0%"

    # One module by a click, another with the keyboard, and the numbers of the new plan.
    page.locator(f'[data-layer="{modules[0]}"]').click()
    rollout(len(modules) - in_layer + 1)
    page.locator(f'[data-layer="{modules[0]}"]').focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Space")
    rollout(len(modules) - in_layer + 2)
    panel.locator("button", has_text="Measure").click()
    expect(rows).to_have_count(1 + 5)
    last = rows.last.inner_text().split("\t")
    kept = [name for name in modules[:in_layer] if name not in modules[:2]]
    alone = notebook.ask(f"measure(plan.with_bf16(modules={kept}, side='rollout')).gen_kl_error")
    assert last[1] == str(len(modules) - len(kept)) and last[5] == f"{alone:.2e}" != tries[1][5]

    # Both sides at once.
    expect(cells.first).to_have_attribute("aria-pressed", "true")
    panel.locator("button", has_text="both").click()
    expect(cells.first).to_have_attribute("aria-pressed", "false")  # the grid knows: one side of it is not in FP8
    panel.get_by_role("button", name="toggle every module").click()
    expect(panel).to_contain_text("both sides alike")
    notebook.shot()
