"""The quickstart's page: complete, self-contained, and with nothing in it that acts."""

from html.parser import HTMLParser

import pytest

from undertow.report.page import Row
from undertow.report.quickstart import quickstart_page

FIGURES = {
    "judged": True,
    "passed": True,
    "bars": {"byte_unigram": 3.319, "byte_bigram": 2.447, "token_unigram": 2.165},
    "nats_per_byte": 1.6604,
    "words": {"sampled": 1000, "known": 710, "distinct": 321},
    "resumed": "Killed after step 3 & resumed.",
    "parameters": {"total": 1992060, "active": 1001005, "routed_experts": 589824},
    "samples": ["HAMLET:\n<script>alert('$verdict')</script> & more"],
}
METRICS = [
    {
        **{"step": n, "tokens": 2048 * n, "train/lm_loss": loss, "moe/load_max": 2.0, "moe/load_min": 0.5},
        **{"train/tokens_per_second": rate, "train/tflops_algorithmic": 0.25, "memory/peak_bytes": 3 * 2**29},
        "train/lr": 0.5,
        **extra,
    }
    for n, loss, rate, extra in (
        (1, 8.0, 100.0, {}),
        (2, None, 2048.0, {"train/skipped": 1, "train/balance_loss": 1.25}),
        (
            *(3, 6.0, 4000.0),
            {
                **{"train/skipped": 1, "train/mtp_loss": 7.5, "train/balance_loss": None},
                **{"eval/loss": 7.0, "eval/nats_per_byte": 2.3, "eval/indexer_recall": 0.75},
            },
        ),
    )
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
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        self.seen.add(tag)


def test_page():
    page = quickstart_page(FIGURES, METRICS, [Row("seed", "7")])
    tags = Tags()
    tags.feed(page)
    assert tags.open == [] and tags.links == [] and "script" not in tags.seen
    assert "http" not in page and "url(" not in page
    assert "&lt;script&gt;alert(&#x27;$verdict&#x27;)&lt;/script&gt; &amp; more" in page
    rows = {"the model": "1.660", "byte bigram frequencies": "2.447", "tokens per second, median of the steps": "2,048"}
    for name, value in {**rows, "routed experts": "589,824"}.items():
        assert f"<td>{name}</td><td>{value}</td>" in page
    assert "<td>seed</td><td>7</td>" in page
    assert "<td>active<small>Those whose values one token meets" in page
    assert "Over all held-out text. What the run measured on its way is over a sample of it" in page
    assert "better than the frequencies" in page
    assert "710 of 1,000 sampled words" in page and "321 of these are distinct" in page
    assert "Killed after step 3 &amp; resumed." in page


@pytest.mark.parametrize(
    ("change", "text"), [({"judged": False}, "is not judged"), ({"passed": False}, "is not good enough")]
)
def test_verdict(change, text):
    assert text in quickstart_page(FIGURES | change, METRICS)
