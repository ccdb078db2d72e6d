"""The report clicked through in a headless Chromium; no network needed."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from recorded_results import HOSTILE, kept_images, write_results, write_run
from waiting import until

from benchmark.report.page import write_report

CSS = "css selector"
BOARD = "data-cifar-10-dirichlet-0-1-3-clients-2-a-round-papercnn-2-rounds"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = write_results(tmp_path_factory.mktemp("results"))
    return write_report(folder / "report.html", folder).path.as_uri()


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Address of a page of two runs that kept their images."""
    folder = tmp_path_factory.mktemp("kept")
    for seed in (0, 1):
        write_run(folder / "runs" / str(seed), "FedPer", seed, [0.6, 0.5, 0.667], kept=kept_images())
    return write_report(folder / "report.html", folder).path.as_uri()


@pytest.fixture(params=[1400, 390])
def browser(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """Headless Chromium of a desk's and a phone's width; what it said on its console fails the test."""
    webdriver = pytest.importorskip("selenium.webdriver")
    binary = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    chromedriver = shutil.which("chromedriver")
    if not binary or not chromedriver:
        pytest.skip("no Chromium with chromedriver is installed")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(chromedriver))
    metrics = {"width": request.param, "height": 900, "deviceScaleFactor": 1, "mobile": request.param < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    driver.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    driver.width = request.param
    yield driver
    said = driver.get_log("browser")
    driver.quit()
    assert said == []


def opened(browser: Any, address: str, anchor: str) -> Any:
    browser.get(f"{address}#{anchor}")
    return browser.find_element(CSS, f"#{anchor}")


def names(browser: Any) -> list[str]:
    """Methods of the ranking that is shown, in its order."""
    script = "return [...document.querySelectorAll('.open .board:not([hidden]) .numbers')].slice(0, 1).flatMap("
    script += "board => [...board.querySelectorAll('tbody th a')].map(link => link.innerText))"
    return list(browser.execute_script(script))


def test_every_section_fits(browser: Any, address: str) -> None:
    browser.get(address)
    for each in browser.find_elements(CSS, "main > section"):
        section = opened(browser, address, each.get_attribute("id"))
        assert section.is_displayed()
        assert browser.execute_script("return document.querySelectorAll('main > section.open').length") == 1
        assert browser.execute_script("return document.documentElement.scrollWidth") <= browser.width
    # Nothing of a ranking lies outside of its box.
    opened(browser, address, "leaderboard")
    wide = "return [...document.querySelectorAll('.open .scroll')].map(box => box.scrollWidth - box.clientWidth)"
    assert max(browser.execute_script(wide)) == 0
    opened(browser, address, "figures")
    loaded = "return [...document.images].map(i => i.complete && i.naturalWidth > 0)"
    assert browser.execute_script(loaded) == [True]


def test_a_board_sorts_filters_and_is_saved(browser: Any, address: str, tmp_path: Path) -> None:
    section = opened(browser, address, "leaderboard")
    assert browser.title.startswith("Leaderboard")
    assert names(browser) == ["FedAvg", "FedVPT"]
    if browser.width == 1400:  # a phone shows no headings
        head = section.find_elements(CSS, "thead th")[2]
        button = head.find_element(CSS, "button")
        button.click()
        assert (head.get_attribute("aria-sort"), names(browser)) == ("descending", ["FedAvg", "FedVPT"])
        button.send_keys("\ue007")  # the Enter key
        assert (head.get_attribute("aria-sort"), names(browser)) == ("ascending", ["FedVPT", "FedAvg"])
        button.click()
    words, said = section.find_element(CSS, "input"), section.find_element(CSS, "output")
    words.send_keys("cifar fedper")
    assert (names(browser), said.text) == ([], "0 of 1 leaderboards")
    words.clear()
    words.send_keys("FEDVPT")
    assert (names(browser), said.text) == (["FedAvg", "FedVPT"], "1 of 1 leaderboards")
    section.find_element(CSS, "[data-save=csv]").click()
    csv = until(lambda: list(tmp_path.glob("*.csv")), 20)[0].read_text().splitlines()
    assert csv[0].startswith(
        '#,Method,After aggregation,After local training,Last ten rounds,"Best round, on test data"'
    )
    assert csv[1].startswith("1,FedAvg,75.00 ± 7.07,70.00 ± 0.00,")
    section.find_element(CSS, "[data-save=tex]").click()
    tex = until(lambda: list(tmp_path.glob("*.tex")), 20)[0].read_text()
    assert "1 & FedAvg & 75.00 $\\pm$ 7.07 & " in tex
    assert tex.endswith("\\bottomrule\n\\end{tabular}\n")
    section.find_element(CSS, ".board details summary").click()
    assert "lr 0.5" in section.text


def test_charts_hide_isolate_zoom_and_tell_values(browser: Any, address: str) -> None:
    from selenium.webdriver import ActionChains

    section = opened(browser, address, BOARD)
    until(lambda: section.get_attribute("data-drawn") is not None, 20)
    charts = section.find_elements(CSS, ".chart")
    assert len(charts) == 7
    assert all(chart.find_elements(CSS, "svg path") for chart in charts)
    clients, buttons = charts[2], {each.text: each for each in section.find_elements(CSS, ".methods button")}
    pressed = lambda: [name for name, each in buttons.items() if each.get_attribute("aria-pressed") == "true"]  # noqa: E731
    drawn = lambda: [name for name in ("FedAvg", "FedVPT", "FedVPT (lr 0.5)") if f">{name}<" in svg(clients)]  # noqa: E731
    assert (pressed(), drawn()) == (["FedAvg", "FedVPT"], ["FedAvg", "FedVPT"])
    buttons["FedAvg"].click()
    until(lambda: drawn() == ["FedVPT"], 20)
    ActionChains(browser).double_click(buttons["FedVPT (lr 0.5)"]).perform()
    until(lambda: drawn() == ["FedVPT (lr 0.5)"], 20)
    buttons["All"].click()
    until(lambda: len(drawn()) == 3, 20)
    buttons["Ranked ones"].click()
    until(lambda: drawn() == ["FedAvg", "FedVPT"], 20)
    # Values under the pointer; a hostile name is text there too.
    marks = clients.find_elements(CSS, ".mark-symbol path")
    assert len(marks) == 6
    told, tip = [], "return document.querySelector('#vg-tooltip-element.visible')?.innerText"
    for mark in marks:
        browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", mark)
        ActionChains(browser).move_to_element(mark).perform()
        told.append(until(lambda: browser.execute_script(tip), 20))
    assert any("FedAvg" in text and "amazon" in text and "55.00" in text for text in told)
    assert any(HOSTILE in text for text in told)
    assert browser.execute_script("return document.querySelectorAll('#vg-tooltip-element img').length") == 0
    # Ctrl and the wheel zoom, a double click goes back.
    before = ticks(charts[0])
    zoom = """
        const at = arguments[0].querySelector("svg").getBoundingClientRect();
        const [clientX, clientY] = [at.x + at.width / 2, at.y + at.height / 2];
        const turn = { bubbles: true, cancelable: true, deltaY: -300, ctrlKey: arguments[1], clientX, clientY };
        document.elementFromPoint(clientX, clientY).dispatchEvent(new WheelEvent("wheel", turn));
    """
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", charts[0])
    browser.execute_script(zoom, charts[0], False)
    browser.execute_async_script("setTimeout(arguments[0], 100)")
    assert ticks(charts[0]) == before  # the wheel alone is the page's
    browser.execute_script(zoom, charts[0], True)
    until(lambda: ticks(charts[0]) != before, 20)
    ActionChains(browser).double_click(charts[0].find_element(CSS, "svg")).perform()
    until(lambda: ticks(charts[0]) == before, 20)


def test_kept_images_of_a_chosen_run_client_and_class(browser: Any, kept: str) -> None:
    from selenium.webdriver.support.ui import Select

    section = opened(browser, kept, BOARD)
    until(lambda: section.get_attribute("data-drawn") is not None, 20)
    charts = section.find_elements(CSS, ".chart")[-5:]
    said = lambda: [text for text in map(svg, charts) for text in re.findall(r">((?:AUROC|ECE|AP)[^<]*)<", text)]  # noqa: E731
    told = ["ECE 0.355, 12 images", "AUROC 0.917, mean over 3 of 3 classes", "AP 0.874, mean over 3 of 3 classes"]
    assert said() == told
    cells = lambda: [each.text for each in charts[0].find_elements(CSS, ".role-mark.mark-text text")]  # noqa: E731
    assert sorted(cells()) == ["1", "1", "1", "1", "1", "2", "2", "3"]
    fields = lambda: {  # noqa: E731  what is shown of the chosen run
        each.get_attribute("name"): Select(each)
        for each in section.find_elements(CSS, ".choices select")
        if each.is_displayed()
    }
    assert [each.text for each in fields()["client"].options] == ["All together", "amazon", "dslr", HOSTILE]
    fields()["client"].select_by_visible_text("dslr")
    fields()["of"].select_by_visible_text("mug")
    until(lambda: said() == ["ECE 0.357, 4 images", "AUROC 0.750, 2 of 4 images", "AP 0.833, 2 of 4 images"], 20)
    fields()["run"].select_by_visible_text("FedPer, seed 1, after aggregation")
    assert fields()["client"].first_selected_option.text == "dslr"  # the other run is looked at in the same way
    assert fields()["of"].first_selected_option.text == "mug"
    assert said() == ["ECE 0.357, 4 images", "AUROC 0.750, 2 of 4 images", "AP 0.833, 2 of 4 images"]
    fields()["client"].select_by_visible_text(HOSTILE)  # of one class: no curve
    until(lambda: said() == ["ECE 0.294, 3 images"], 20)
    assert sorted(cells()) == ["1", "2"]
    assert browser.execute_script("return document.documentElement.scrollWidth") <= browser.width
    assert browser.execute_script("return document.images.length") == 0


def ticks(chart: Any) -> list[str]:
    return sorted(each.text for each in chart.find_elements(CSS, ".role-axis-label text"))


def svg(chart: Any) -> str:
    return str(chart.find_element(CSS, "svg").get_attribute("outerHTML"))
