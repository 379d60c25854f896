"""The report is one self-contained page that says what the data says."""

import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest

from tests.unit.report_fixture import make_data
from timzero.report import ReportData, render, write
from timzero.report.charts import _merged
from timzero.steps import by_step

SECTIONS = (
    "Reward",
    "Training-inference mismatch",
    "Tokens compared",
    "Staleness",
    "Throughput",
    "Step time",
    "Entropy",
    "Gradient norm",
    "Who worked when",
    "Drops by reason",
    "Counts",
    "Run",
)
VOID = {"meta", "br", "img", "link", "input", "hr"}


class Checker(HTMLParser):
    """Raises on unbalanced tags; collects headings, ids and whatever a browser would fetch."""

    def __init__(self):
        super().__init__()
        self.open, self.headings, self.ids, self.fetched = [], [], [], []

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            if name in ("src", "href", "xlink:href") and not value.startswith("#"):
                self.fetched.append(value)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_data(self, data):
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)


def check(page):
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    return checker


@pytest.fixture(scope="module")
def page():
    return render(make_data())


def test_the_page_is_well_formed_and_has_every_section(page):
    assert tuple(check(page).headings) == SECTIONS


def test_bytes_published_are_compared_with_those_of_the_weights(page):
    assert re.search(r"bytes published.*?[\d,]+ for [\d,]+ of weights \(2\.0 %\)", page, re.DOTALL)


def test_the_page_fetches_nothing(page):
    assert check(page).fetched == []
    assert not re.search(r"@import|url\((?!#)", page)
    assert "<script" not in page


def test_element_ids_are_unique_and_every_reference_is_there(page):
    ids = check(page).ids
    assert len(ids) == len(set(ids))
    assert set(re.findall(r"url\(#([^)]+)\)", page)) | set(re.findall(r'href="#([^"]+)"', page)) <= set(ids)


def test_every_chart_is_valid_svg_with_text(page):
    svgs = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)
    assert len(svgs) == 9
    for svg in svgs:
        assert ET.fromstring(svg).findall(".//text")


def test_exact_runs_say_that_every_bit_is_equal(page):
    assert "every bit of every token is equal" in page
    assert "0.31 → 0.98" in page
    assert "1,600 = 1,600 + 0 + 0" in page
    assert f"{24:064x}" in page
    assert "No trajectory was dropped." in page


def test_fast_runs_show_how_large_the_mismatch_is():
    fast = render(make_data(numerics="fast"))
    check(fast)
    assert "every bit" not in fast
    assert ">p99<" in fast


def test_drops_and_a_broken_equation_show():
    data = make_data(dropped={"reward_timeout": 8, "infra_error": 3})
    assert "reward timeout" in render(data)
    assert "DOES NOT HOLD" not in render(data)
    data.metrics["accepted"] += 1
    assert "DOES NOT HOLD" in render(data)


def test_a_run_that_has_not_begun_can_be_reported():
    data = make_data(num_steps=0)
    data.evaluations.clear()
    check(render(data))


def test_text_of_the_run_is_escaped():
    data = make_data()
    data.run["config"]["model"] = "<script>alert(1)</script>"
    assert "<script" not in render(data)


def test_data_is_kept_beside_the_page_and_read_back(tmp_path):
    data = make_data(num_steps=3)
    path = write(data, tmp_path / "deep" / "report.html")
    assert ReportData.load(path.with_suffix(".json")) == data
    assert render(ReportData.load(path.with_suffix(".json"))) == path.read_text()


def test_a_file_that_is_no_report_data_is_refused(tmp_path):
    for text in ("{", "[]", '{"run": {}}'):
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(ValueError, match="holds no report data"):
            ReportData.load(tmp_path / "x.json")


def test_of_a_step_trained_again_the_newest_counts():
    records = make_data(num_steps=2).steps
    again = records[1] | {"epoch": 2, "metrics": records[1]["metrics"] | {"reward_mean": 0.5}}
    assert [s.reward for s in by_step([*records, again])] == [records[0]["metrics"]["reward_mean"], 0.5]
    assert [s.epoch for s in by_step([again, *records])] == [1, 2]


def test_intervals_merge_where_they_touch():
    assert _merged([(3, 4), (0, 2), (1, 3)]) == [(0, 4)]
    assert _merged([(0, 1), (2, 3)]) == [(0, 1), (2, 3)]
