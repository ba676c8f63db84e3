"""The quickstart's page: complete, self-contained, and with nothing in it that acts."""

from html.parser import HTMLParser

import pytest

from undertow.report.curve import loss_curve
from undertow.report.quickstart import quickstart_page

FIGURES = {
    "judged": True,
    "passed": True,
    "bars": {"byte_unigram": 3.319, "byte_bigram": 2.447, "token_unigram": 2.165},
    "nats_per_byte": 1.6604,
    "tokens": 4096,
    "training_seconds": 2.0,
    "parameters": {"total": 1992060, "routed_experts": 589824},
    "samples": ["HAMLET:\n<script>alert('$verdict')</script> & more"],
}
METRICS = [
    {"step": 1, "train/lm_loss": 8.0, "moe/load_max": 2.0, "moe/load_min": 0.5},
    {"step": 2, "train/lm_loss": 6.0, "eval/loss": 7.0, "moe/load_max": 1.5, "moe/load_min": 0.75},
]


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.links: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.seen.add(tag)
        self.links += [value for name, value in attrs if name in ("src", "href", "srcset", "xlink:href")]
        if tag not in ("meta", "path", "polyline"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in ("path", "polyline"):
            assert self.open.pop() == tag


def test_page():
    page = quickstart_page(FIGURES, METRICS)
    tags = Tags()
    tags.feed(page)
    assert tags.open == [] and tags.links == [] and "script" not in tags.seen
    assert "http" not in page and "url(" not in page
    assert "&lt;script&gt;alert(&#x27;$verdict&#x27;)&lt;/script&gt; &amp; more" in page
    rows = {"the model": "1.660", "byte bigram frequencies": "2.447", "tokens per second": "2,048"}
    for name, value in {**rows, "routed experts": "589,824"}.items():
        assert f"<td>{name}</td><td>{value}</td>" in page
    assert "better than the frequencies" in page


@pytest.mark.parametrize(
    ("change", "text"), [({"judged": False}, "is not judged"), ({"passed": False}, "no better than frequencies")]
)
def test_verdict(change, text):
    assert text in quickstart_page(FIGURES | change, METRICS)


def test_curve_spans_its_axes():
    curve = loss_curve([(1, 8.0), (3, 4.0)], [(2, 6.0)], "step", "nats")
    assert 'points="44.0,44.0 676.0,236.0"' in curve
    assert '<circle cx="360.0" cy="140.0" r="4"><title>6.000</title>' in curve
    assert "nats: 8.00 to 4.00" in curve and "step 1 to 3" in curve


def test_curve_of_one_point_and_of_none():
    assert "44.0,236.0" in loss_curve([(1, 2.0)], [], "step", "nats")
    with pytest.raises(ValueError, match="at least one point"):
        loss_curve([], [], "step", "nats")
