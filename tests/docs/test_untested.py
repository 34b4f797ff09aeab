"""Each page that mentions GPUs says that no test covers them."""

from tests.commands import ROOT

NOTE = "code for GPUs has not been tested on a GPU yet"
# pages that are generated from the code, or that describe the prices and the cache keys of GPUs,
# which are tested without a GPU
OTHER_PAGES = {"api.md", "argo-fields.md", "commands.md", "cost.md", "cache.md"}


def test_each_page_about_gpus_says_that_no_gpu_was_tested() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    texts = {
        page.name: " ".join(page.read_text().split())
        for page in pages
        if page.name not in OTHER_PAGES
    }

    silent_pages = {
        name
        for name, text in texts.items()
        if ("GPU" in text or "CUDA" in text) and NOTE not in text
    }

    assert silent_pages == set()
    assert {"README.md", "training.md", "figures.md"} <= {
        name for name, text in texts.items() if NOTE in text
    }
