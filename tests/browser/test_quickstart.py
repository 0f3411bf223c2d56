"""The quickstart as a reader meets it: Run All, Stop in the middle, toggle, Run again; in both themes."""

import shutil
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.browser, pytest.mark.timeout(400)]
SHOTS = Path(__file__).parent / "screenshots"


@pytest.mark.parametrize("theme", ["JupyterLab Light", "JupyterLab Dark"])
def test_run_all_stop_toggle_run(theme, root, tmp_path):
    pytest.importorskip("playwright")
    sys.path.insert(0, str(Path(__file__).parent))
    import lab
    from playwright.sync_api import expect

    shutil.copytree(root / "notebooks", tmp_path / "notebooks", ignore=shutil.ignore_patterns("runs", ".ipynb*"))
    SHOTS.mkdir(exist_ok=True)
    short = theme.split()[-1].lower()
    shot = lambda page, name: page.screenshot(path=SHOTS / f"{short}-{name}.png")  # noqa: E731
    env = {"FP8LAB_FAST": "0", "FP8LAB_HOME": str(tmp_path / "runs")}
    with lab.jupyter_lab(tmp_path / "notebooks", theme=theme, env=env) as (base, token), lab.browser_page() as page:
        lab.open_notebook(page, base, token, "00_quickstart.ipynb")
        lab.start_all(page)
        stop = page.locator("button.jupyter-button", has_text="Stop")
        expect(stop).to_be_enabled(timeout=120_000)
        page.wait_for_function(
            "() => [...document.querySelectorAll('.js-plotly-plot')].some(g => (g.data ?? []).some("
            "t => t.meta === 'fp8-e2e/mismatch' && t.y?.length > 3))",
            timeout=180_000,
        )
        stop.scroll_into_view_if_needed()
        shot(page, "1-running")
        stop.click()  # while the cell panel.wait() is busy
        expect(page.get_by_text("Stopped after")).to_be_visible(timeout=30_000)
        drawn = lab.points(page, "fp8-e2e/mismatch")
        lab.wait_all(page)
        assert 3 < drawn < 30 and lab.points(page, "fp8-e2e/mismatch") == drawn
        shot(page, "2-stopped")

        for arm in ("FP8 end to end", "BF16"):
            page.locator("button.jupyter-widget-toggle-button, button.widget-toggle-button", has_text=arm).click()
        page.locator("button.jupyter-button", has_text="Run").click()
        page.wait_for_timeout(3000)
        assert lab.points(page, "fp8-rollout/mismatch") < 30, "the arm started anew"
        stop.click()
        expect(page.get_by_text("Stopped after")).to_be_visible(timeout=30_000)
        for name, step in (("3-top", 0), ("4-middle", 1), ("5-end", 2), ("6-last", 3)):
            page.evaluate(
                "top => { (document.querySelector('.jp-WindowedPanel-outer') ??"
                " document.querySelector('.jp-Notebook')).scrollTop = top; }",
                2500 * step,
            )
            page.wait_for_timeout(700)
            shot(page, name)
        assert page.blocked == [], "something asked for the network"
        print("console errors:", page.errors)
