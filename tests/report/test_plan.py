"""A plan's page: complete, self-contained, and safe with any name; its numbers are those of the plan."""

from __future__ import annotations

import copy
import html
import json
import re
from html.parser import HTMLParser

import pytest

import undertow
from undertow.planner.drawing import page_document
from undertow.report.plan import plan_page
from undertow.report.plan_timeline import embedded

NASTY = "</script><script>alert(1)</script>&amp;\u2028<!--"


class Tags(HTMLParser):
    """Elements that are open, links, and the text of scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.scripts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.links += [value for name, value in attrs if name in ("src", "href", "srcset", "xlink:href")]
        self.ids += [value for name, value in attrs if name == "id"]
        if tag != "meta":
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def document():
    plan = undertow.plan("v4-flash", "32xMI355X", layout="Et*10|t*12|t*12|t*9mL", recompute="first:1")
    return page_document(plan)


@pytest.fixture(scope="module")
def page(document):
    return plan_page(document)


def test_one_file_without_links(page):
    tags = Tags(page)
    assert tags.open == [] and tags.links == [] and len(tags.scripts) == 2
    assert "http" not in page and "url(" not in page and "@import" not in page
    assert len(tags.ids) == len(set(tags.ids)) and {"timeline", "held", "tracks", "tip"} <= set(tags.ids)
    assert page.count('tabindex="0"') >= 2 and 'role="application"' in page


def test_its_data_come_back(document, page):
    data = json.loads(Tags(page).scripts[0])
    assert data == {**document["tracks"], "limit_bytes": 288 * 10**9, "top_bytes": 299_520_000_000}


def test_scripts_are_small_and_find_what_they_look_for(page):
    code = Tags(page).scripts[1]
    assert code.count("\n") < 420
    wanted = set(re.findall(r'getElementById\("(\w+)"\)', code))
    assert wanted <= set(Tags(page).ids)
    assert set(re.findall(r'data-move="([^"]+)"', page)) == {"-", "+", "ArrowLeft", "ArrowRight", "0"}


def test_sections_and_numbers(document, page):
    headings = re.findall(r"<h2>([^<]+)</h2>", page)
    assert headings == [
        *("Verdict", "Parameters", "Memory of a GPU", "Timeline of an iteration", "Memory over time"),
        *("Operations of an iteration", "Roofline"),
    ]
    text = re.sub(r"<[^>]+>", " ", page.replace("</td><td", "</td> <td"))
    text = " ".join(text.split())
    time = document["time"]
    for part in (
        "v4-flash on 32xMI355X",
        "Fits: the fullest GPU, of stage ",
        f"TFLOP/s a GPU, reported {time['tflops_reported']:,.1f}",
        "routed experts 277.03 B 95.22%",
        "shared shared query path, as released 290.94 B",
        "own rank own query path, the published AMD variant 290.80 B",
        "layout schedule 1f1b Et*10|t*12|t*12|t*9mL",
        "all 95.08 31.69 63.39 380.7",
        "The limit is 288.0 GB (268.2 GiB).",
    ):
        assert part in text, part


def test_what_is_estimated_is_hatched_and_said(page):
    parts = re.findall(r'<span class="(k[^"]*)" style="[^"]*" title="([^"]*)"', page)
    assert len(parts) > 20
    for kind, title in parts:
        assert (kind == "k e") == title.endswith("estimated"), title
    assert "weights<small>measured</small>" in page and "optimizer state<small>measured</small>" in page


def test_wide_tables_scroll_by_themselves(page):
    tables = re.findall(r'(<div class="scroll"[^>]*>)?<table class="wide', page)
    assert len(tables) >= 5 and all(tables)
    assert ".scroll { overflow-x: auto; max-width: 100%; margin: 1.25rem 0;" in page


def test_bars_are_in_proportion(document, page):
    widths = [float(each) for each in re.findall(r"width:([\d.]+)%\" title", page)]
    stages = document["memory"]["stages"]
    most = 1.04 * max(288e9, *(stage["total_bytes"] for stage in stages))
    sizes = [term["bytes"] for stage in stages for term in stage["terms"]]
    assert widths == pytest.approx([100 * size / most for size in sizes], abs=6e-4)


def test_names_cannot_break_out(document):
    nasty = copy.deepcopy(document)
    nasty |= {"name": NASTY, "fits": False, "refusal": NASTY, "uncalibrated": [NASTY]}
    nasty["memory"]["stages"][0]["terms"][0]["name"] = nasty["settings"]["layout"] = NASTY
    nasty["roofline"]["operations"][0]["name"] = NASTY
    nasty["tracks"]["note"] = NASTY
    page = plan_page(nasty)
    tags = Tags(page)
    assert len(tags.scripts) == 2 and tags.open == [] and json.loads(tags.scripts[0])["note"] == NASTY
    assert "<script>alert" not in page and page.count("&lt;/script&gt;") >= 5


def test_embedded_json():
    assert embedded({"a": "</script>&\u2028"}) == '{"a":"\\u003c/script\\u003e\\u0026\\u2028"}'
    with pytest.raises(ValueError):
        embedded(float("nan"))


def test_without_measurements_left_over(document):
    assert "All of it is covered by measurements" in plan_page(document | {"uncalibrated": []})
    assert "<li>a &amp; b</li>" in plan_page(document | {"uncalibrated": ["a & b"]})


def test_too_much_memory(document):
    small = copy.deepcopy(document)
    small["memory"]["limit_bytes"] = 100 * 10**9
    small |= {"fits": False, "refusal": "it does not fit"}
    page = plan_page(small)
    assert "\u2717 it does not fit." in page and page.count(" too much</b>") == 4


def test_a_model_that_needs_next_to_nothing():
    page = plan_page(page_document(undertow.plan("v4-debug", "1xH200")))
    assert "far to the right of the bars" in page and '<i class="limit" style="left' not in page
    assert "Peak of one GPU of each stage. The limit is 141.0 GB" in page


def test_state_on_the_host():
    plan = undertow.plan("v4-flash", "16xMI308X", tensor=4, pipeline=4, expert=4, offload_optimizer=True)
    most = max(rank.host_bytes for rank in plan.memory.stages)
    page = plan_page(page_document(plan))
    assert most > 50e9 and f"Besides, the host's memory holds up to {most / 1e9:,.1f} GB" in html.unescape(page)


def test_replicas():
    page = plan_page(page_document(undertow.plan("v4-flash", "32xMI355X+8xH200")))
    assert "<h1>v4-flash on 32xMI355X + 8xH200</h1>" in page and "<h2>GPUs that sample</h2>" in page
    assert "<td>longest context that fits</td>" in page and "ms a step" in page


def test_what_the_tuner_found():
    plan = undertow.plan("v4-tiny", "4xH200", tune=True, pipeline=2, expert=2, schedule="1f1b")
    page = plan_page(page_document(plan))
    assert Tags(page).open == [] and "<h2>Tuning</h2>" in page and "<h3>As a recipe</h3>" in page
    assert f'layout: "{plan.layout}"' in re.sub("&quot;", '"', page) and 'data-copy="fragment"' in page
    way = r"<tr><td>chosen</td><td>([\d.]+)</td><td></td>"
    assert float(re.search(way, page)[1]) == pytest.approx(plan.tuned.seconds_per_iteration, rel=1e-3)
    line = re.search(r'<path class="line c0" d="M0\.0,([\d.]+)((?:H[\d.]+V[\d.]+)+)', page)
    heights = [float(line[1]), *map(float, re.findall(r"V([\d.]+)", line[2]))]
    assert heights == sorted(set(heights), reverse=True) and len(heights) > 2
    assert page.count('<span class="dot') == len(plan.tuned.runners_up) + 1 + page.count("FLOP/byte, ") // 2
