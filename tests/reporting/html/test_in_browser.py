"""The report in a real browser: drawn elements, network requests and speed."""

import json

import pytest

from rl import report
from tests.support.browser import browser, opened
from tests.support.report_runs import HACK, START_S, TEXT, MadeRun, make_run

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

LOSS = (
    {"time": START_S + 20, "event": "lost", "role": "generator_0", "reason": "rank 0 of 1 is dead"},
    {"time": START_S + 26.5, "event": "recovered", "role": "generator_0", "after_s": 6.5},
)
EVIL = "</script><script>alert(1)</script><img src='https://evil.invalid/x' onerror='alert(2)'>"


@pytest.fixture(scope="module")
def chromium():
    with browser() as launched:
        yield launched


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Write made-up runs and return their folders by name."""
    folder = tmp_path_factory.mktemp("runs")
    return {
        "whole": make_run(folder / "whole", MadeRun(events=LOSS)),
        "other": make_run(
            folder / "other", MadeRun(seed=1, num_steps=30, lr=1e-3, status="running")
        ),
        "evil": make_run(folder / "evil", MadeRun(num_steps=3, reply=EVIL)),
        "old": make_run(folder / "old", MadeRun(num_steps=5, is_new=False)),
    }


def reported(*folders, name="report"):
    file = folders[0].parent / f"{'-'.join(f.name for f in folders)}-{name}.html"
    assert report.main([*map(str, folders), "--output", str(file)]) == 0
    return file


@pytest.fixture
def whole(chromium, runs):
    with opened(chromium, reported(runs["whole"])) as seen:
        yield seen
        assert (seen.errors, seen.dialogs) == ([], [])
        assert [url for url in seen.requests if not url.startswith(("file:", "data:"))] == []
        assert len([url for url in seen.requests if url.startswith("file:")]) == 1


def test_a_page_that_is_not_scrolled_draws_all_its_charts(whole):
    whole.until("document.querySelectorAll('.chart').length > 9")
    whole.until("!document.querySelector('.chart:not([data-drawn])')")


def test_every_step_and_evaluation_is_on_the_curves(whole):
    charts = whole.numbers("#curves .headlines .chart[data-drawn]", "data-drawn")
    assert charts[0] == 41  # the 40 steps, and the evaluation before them
    assert whole.texts("#curves .headlines h3")[:2] == ["Learning", "Trainer against generator"]
    assert whole.count("#curves .headlines .card") == 9
    assert whole.texts("#overview .tile-value")[0] == "40 of 40"


def test_each_process_has_a_lane_and_every_activity_is_drawn(whole):
    whole.go("timeline", "canvas[data-drawn]")
    whole.page.get_by_role("button", name="whole run").click()
    # In each step: three spans of the trainer, a pull and the merged requests, a score, two waits.
    assert whole.numbers("#timeline canvas", "data-drawn") == [40 * 8]
    whole.page.get_by_role("button", name="last step").click()
    assert whole.numbers("#timeline canvas", "data-drawn")[0] in (8, 9)


def test_step_of_the_timeline_is_shown_by_its_number(whole):
    whole.go("timeline", "canvas[data-drawn]")
    whole.page.locator("#timeline input").fill("7")
    whole.page.locator("#timeline input").press("Enter")
    canvas = whole.page.locator("#timeline canvas")
    box = canvas.bounding_box()
    whole.page.mouse.move(box["x"] + 128 + 0.7 * (box["width"] - 136), box["y"] + 34 + 26 + 6)
    tip = whole.page.locator(".tip").inner_text()
    assert "forward_backward" in tip
    assert "580 ms" in tip  # 0.29 of a step of 2 s
    assert "version" in tip


def test_time_of_a_step_is_split_into_its_parts(whole):
    whole.go("time", ".stack")
    rows = whole.texts("#time .columns .card:first-child tr td:first-child")
    assert rows == [
        "generate", "train", "publish", "score", "push, within it", "pull, within it",
        "one evaluation",
    ]  # fmt: skip
    assert whole.texts("#time .bar")[:4] == ["31%", "62%", "80%", "42%"]
    whole.page.wait_for_selector("#time .chart[data-drawn='40']")


def test_rollout_is_shown_token_by_token(whole):
    whole.go("rollouts", ".tokens")
    assert whole.texts("#rollouts [data-count]")[0] == "160 of 160 rollouts"
    tokens = whole.page.locator("#rollouts .tokens .token")
    assert tokens.count() == len(TEXT) + 1
    assert "".join(tokens.all_inner_texts()) == f"{TEXT}<|im_end|>"
    tokens.nth(0).hover()
    tip = whole.page.locator(".tip").inner_text()
    labels = (
        "generator's logprob",
        "trainer's logprob",
        "difference",
        "advantage",
        "policy version",
        "mask",
    )
    assert all(label in tip for label in labels)
    tokens.last.hover()
    assert "0, not trained on" in whole.page.locator(".tip").inner_text()


def test_long_reply_is_rendered_while_scrolling(chromium, tmp_path):
    folder = make_run(tmp_path / "verbose", MadeRun(num_steps=1, samples=1, tokens=10_000))
    with opened(chromium, reported(folder)) as seen:
        seen.go("rollouts", ".tokens")
        assert seen.count("#rollouts .token[data-i]") == 3000
        assert seen.texts("#rollouts .rest") == ["… 7001 more tokens"]
        seen.until(
            """(box => {
                box.scrollTop = box.scrollHeight;  // as often as it grows
                return box.querySelectorAll('.token[data-i]').length === 10001;
            })(document.querySelector('#rollouts .detail'))"""
        )
        assert seen.count("#rollouts .rest") == 0


def test_rollouts_are_filtered_ordered_and_searched(whole, runs):
    lines = [
        json.loads(line) for line in (runs["whole"] / "rollouts.jsonl").read_text().splitlines()
    ]
    whole.go("rollouts", ".tokens")
    count = whole.page.locator("#rollouts [data-count]")
    whole.page.get_by_label("from step").fill("11")
    whole.page.get_by_label("to step").fill("20")
    whole.page.get_by_label("to step").press("Enter")
    assert count.inner_text() == "40 of 160 rollouts"
    whole.page.locator("#rollouts select").nth(1).select_option("right")
    right = sum(line["correct"] for line in lines if 11 <= line["step"] <= 20)
    assert int(count.get_attribute("data-count") or "") == right
    whole.page.locator("#rollouts select").nth(1).select_option("all")
    whole.page.get_by_label("text").fill("sum-digits/12-0")
    assert count.inner_text() == "4 of 160 rollouts"
    whole.page.get_by_label("text").fill("nowhere to be found")
    whole.page.get_by_role("button", name="search whole replies").click()
    whole.page.wait_for_selector("#rollouts [data-count='0']")


def test_events_options_environment_and_checks_are_listed(whole):
    whole.go("events", "li")
    assert whole.texts("#events li span") == [
        "the run started",
        "generator_0 was lost: rank 0 of 1 is dead",
        "generator_0 is back after 6.5 s",
        "the run finished",
    ]
    whole.go("config", "summary")
    whole.page.locator("#config summary").click()
    whole.page.get_by_label("find an option").fill("optimizer")
    options = whole.page.locator("#config tr[data-path]:visible")
    assert options.all_inner_texts() == ["trainer.optimizer.lr\t4e-05"]
    whole.go("environment", "td")
    assert "2.13.0" in whole.texts("#environment td")
    said = whole.texts("#findings .healthy")[0]
    assert said.startswith("Nothing looks wrong. Looked for: ")
    assert "reward hacking" in said
    assert whole.count("nav .count") == 0


def test_two_runs_are_compared_in_one_report(chromium, runs):
    with opened(chromium, reported(runs["whole"], runs["other"])) as seen:
        assert seen.texts("#overview h1") == ["whole", "other"]
        assert seen.texts("#overview .state") == ["finished", "under way"]
        assert "correct, held-out (greedy), other" in seen.texts("#curves .legend span")
        norms = seen.page.locator("#curves .headlines .card", has_text="Gradient norm").locator(
            ".last"
        )
        assert len(norms.inner_text().split(" · ")) == 2
        seen.go("config", "table")
        rows = seen.texts("#config .body > table tr")
        assert "trainer.optimizer.lr\t4e-05\t0.001" in rows
        assert "loop.num_steps\t40\t30" in rows
        seen.go("rollouts", ".tokens")
        seen.page.locator("#rollouts .tab").nth(1).click()
        seen.until(
            "document.querySelector('#rollouts [data-count]')?.textContent.startsWith('120 of 120')"
        )
        assert seen.errors == []


@pytest.fixture(scope="module")
def seeds(tmp_path_factory):
    """Write three runs of one config and one of another, and return their folders."""
    folder = tmp_path_factory.mktemp("seeds")
    folders = []
    for seed in (0, 1, 2):
        made = MadeRun(num_steps=20 if seed < 2 else 12, seed=seed)
        folders.append(make_run(folder / f"try-seed_{seed}", made))
        config = json.loads((folders[-1] / "config.json").read_text())
        config["values"] |= {"seed": seed, "loop": {"num_steps": 20}}
        (folders[-1] / "config.json").write_text(json.dumps(config))
    return [*folders, make_run(folder / "other", MadeRun(num_steps=20, lr=1e-3, hacked_from=8))]


def test_many_runs_are_drawn_over_each_other_and_seeds_as_a_band(chromium, seeds):
    with opened(chromium, reported(*seeds, name="many")) as seen:
        assert seen.texts("#overview h1") == ["4 runs"]
        assert seen.texts(".legend.shared button") == ["try (seeds 0, 1, 2)", "other"]
        assert seen.count("#overview table.runs tr.band") == 1
        assert seen.count("#overview table.runs tr.member") == 3
        # The findings are those of the first run that has any.
        assert seen.page.locator("#findings .tab[aria-selected='true']").inner_text()[:5] == "other"
        assert seen.count("#findings .finding[data-kind='reward_hacking']") == 1
        titles = seen.texts("#curves .headlines h3")
        assert titles[:3] == [
            "Learning: correct, held-out (greedy)", "Learning: reward, mean",
            "Learning: correct, step's samples",
        ]  # fmt: skip
        card = seen.page.locator("#curves .headlines .card", has_text="Learning: reward, mean")
        card.scroll_into_view_if_needed()
        card.locator(".chart[data-drawn]").wait_for()
        plot = card.locator(".u-over")
        size = plot.bounding_box()
        end = {"x": size["width"] - 4, "y": size["height"] / 2}
        plot.hover(position=end)
        tip = seen.page.locator(".tip")
        assert "step 20" in tip.inner_text()
        assert "try (seeds 0, 1, 2)" in tip.inner_text()
        assert ", 2 of 3 runs)" in tip.inner_text()
        # A hidden line has no row in the box beside the pointer.
        seen.page.locator(".legend.shared button").first.click()
        plot.hover(position=end)
        assert "other" in tip.inner_text()
        assert "seeds" not in tip.inner_text()
        seen.go("config", "table")
        assert len(seen.texts("#config .body > table tr:first-child th")) == 5
        seen.go("rollouts", ".tokens")
        assert seen.count("#rollouts .tab") == 4
        assert seen.errors == []


@pytest.mark.parametrize("width", [1360, 390])
def test_page_of_many_runs_fits_the_window(width, chromium, seeds):
    file = reported(*seeds, name=f"many-{width}")
    with opened(chromium, file, width=width, drawn=False) as seen:
        seen.go("curves", "[data-drawn]")
        for section in ("timeline", "time", "rollouts", "events", "config", "environment"):
            seen.go(section, ".body > *")
        assert seen.page.evaluate("document.documentElement.scrollWidth") <= width
        assert seen.errors == []


def test_short_run_is_too_short_to_tell(chromium, tmp_path):
    folder = make_run(tmp_path / "short", MadeRun(num_steps=3))
    with opened(chromium, reported(folder)) as seen:
        said = seen.texts("#findings .healthy")[0]
        assert said.startswith(
            "Too short to tell: 3 steps are recorded, and some rules need 10. Looked for: wrong "
            "template, replies cut off, "
        )
        assert seen.errors == []


def test_single_evaluation_is_one_value_and_no_curve(chromium, tmp_path):
    folder = make_run(tmp_path / "once", MadeRun(num_steps=12))
    metrics = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    kept = [line for line in lines if "eval/correct" not in line or line["step"] == 0]
    metrics.write_text("".join(json.dumps(line) + "\n" for line in kept))
    with opened(chromium, reported(folder)) as seen:
        tile = seen.page.locator("#overview .tile", has_text="evaluation, correct")
        value = f"{kept[0]['eval/correct']:.3f}".rstrip("0")
        assert tile.locator(".tile-value").inner_text() == value
        assert "the only evaluation" in tile.inner_text()
        seen.page.locator("#curves summary", has_text="eval").click()
        card = seen.page.locator("#curves .card[data-metric='eval/correct']")
        assert card.locator(".single").inner_text().replace("\n", "") == f"{value} at step 0"
        assert card.locator(".chart").count() == 0
        legend = seen.texts("#curves .legend span")
        assert f"correct, held-out (greedy): {value} at step 0" in legend
        assert seen.errors == []


def test_words_that_need_it_are_explained(whole):
    whole.go("time", ".share")
    share = whole.page.locator("#time .share", has_text="of the limit").first
    assert "fastest speed that was measured" in (share.get_attribute("title") or "")
    tile = whole.page.locator("#overview .tile", has_text="generator")
    assert "compute the logprob of each token" in (tile.get_attribute("title") or "")


def test_finding_is_on_top_marked_on_the_curves_and_links_to_its_reply(chromium, tmp_path):
    folder = make_run(tmp_path / "hacked", MadeRun(hacked_from=20))
    with opened(chromium, reported(folder)) as seen:
        card = seen.page.locator("#findings .finding[data-kind='reward_hacking']")
        assert card.locator(".since").inner_text() == "since step 20"
        assert seen.texts("nav .count") == [str(seen.count("#findings .finding"))]
        seen.page.wait_for_selector("#findings .finding .chart[data-drawn]")
        quote = card.locator("button.quote").first
        said = quote.locator("figcaption span").first.inner_text()
        assert quote.locator("blockquote").inner_text() == HACK
        seen.go("rollouts", ".tokens")
        seen.page.get_by_label("to step").fill("3")  # none of the finding's own steps
        seen.page.get_by_label("to step").press("Enter")
        quote.click()
        seen.page.wait_for_selector("#rollouts .row.here")
        seen.page.wait_for_selector("#rollouts .tokens")
        step, problem, sample = said.split(" · ")
        seen.page.wait_for_selector(f"#rollouts .detail h3:text-is('{problem}')")
        facts = [text.replace("\n", " ") for text in seen.texts("#rollouts .detail .fact")]
        assert {step.replace(" ", ""), sample.replace(" ", "")} <= {
            f.replace(" ", "") for f in facts
        }
        assert "".join(seen.texts("#rollouts .tokens .token")) == f"{HACK}<|im_end|>"
        assert seen.errors == []


def test_text_of_a_model_is_never_executed(chromium, runs):
    with opened(chromium, reported(runs["evil"])) as seen:
        seen.go("rollouts", ".tokens")
        assert "".join(seen.texts("#rollouts .tokens .token")) == f"{EVIL}<|im_end|>"
        assert seen.count("#rollouts img") == 0
        assert (seen.errors, seen.dialogs) == ([], [])
        assert [url for url in seen.requests if "evil" in url.rpartition("/")[2]] == [
            seen.requests[0]
        ]


def test_older_run_and_truncated_metrics_file_are_shown(chromium, runs):
    metrics = runs["old"] / "metrics.jsonl"
    text = metrics.read_text()
    metrics.write_text(text[: text.rindex('"loss/mean"')])
    with opened(chromium, reported(runs["old"], name="cut")) as seen:
        assert seen.texts("#overview .tile-value")[0] == "4 of 5"
        problems = " ".join(seen.texts("#overview .problems li"))
        assert "metrics.jsonl" in problems
        assert "logs/spans" in problems
        seen.go("timeline", ".empty")
        seen.go("rollouts", ".tokens")
        seen.page.locator("#rollouts .tokens .token").nth(0).hover()
        assert "not recorded" in seen.page.locator(".tip").inner_text()
        assert seen.errors == []


def test_run_without_steps_has_a_page(chromium, tmp_path):
    folder = tmp_path / "new"
    folder.mkdir()
    (folder / "status.json").write_text('{"status": "running"}')
    with opened(chromium, reported(folder)) as seen:
        assert seen.texts("#overview .tile-value") == ["none yet"]
        for section in ("timeline", "time", "rollouts", "events", "config", "environment"):
            seen.go(section, ".empty")
        assert seen.errors == []


@pytest.mark.parametrize(("width", "theme"), [(1360, "light"), (820, "dark"), (390, "light")])
def test_layout_has_no_overlap_or_overflow_at_any_width(width, theme, chromium, runs):
    with opened(
        chromium,
        reported(runs["whole"], runs["other"]),
        width=width,
        color_scheme=theme,
        drawn=False,
    ) as seen:
        seen.go("curves", "[data-drawn]")
        for section in ("timeline", "time", "rollouts", "events", "config", "environment"):
            seen.go(section, ".body > *")
        assert seen.page.evaluate("document.documentElement.scrollWidth") <= width
        overlapping = seen.page.evaluate(
            """kinds => kinds.flatMap(kind => {
                const boxes = [...document.querySelectorAll(kind)].filter(e => e.checkVisibility())
                    .map(e => [e, e.getBoundingClientRect()]);
                return boxes.flatMap(([a, one], i) => boxes.slice(i + 1).filter(([b, two]) =>
                    !a.contains(b) && one.left < two.right - 1 && two.left < one.right - 1 &&
                    one.top < two.bottom - 1 && two.top < one.bottom - 1).map(() => kind));
            })""",
            [".tile", ".card", ".run", "main > section", "header nav a", ".toolbar > *"],
        )
        assert overlapping == []
        background = seen.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert background == ("rgb(246, 247, 249)" if theme == "light" else "rgb(15, 18, 23)")
        seen.page.locator("#theme").click()
        assert seen.page.evaluate("getComputedStyle(document.body).backgroundColor") != background
        assert seen.errors == []


def test_large_report_is_under_20_mb_and_opens_within_3_s(chromium, tmp_path):
    made = MadeRun(num_steps=10_000, samples=2, tokens=50, spans_a_step=40)
    file = reported(make_run(tmp_path / "long", made))
    assert file.stat().st_size < 20_000_000
    with opened(chromium, file) as seen:
        assert seen.ready_s < 3
        assert seen.texts("#overview .tile-value")[0] == "10,000 of 10,000"
        assert (
            1000 <= seen.numbers("#curves .headlines .chart[data-drawn]", "data-drawn")[0] <= 1010
        )
        seen.go("rollouts", ".tokens")
        assert seen.texts("#rollouts [data-count]")[0] == "20,000 of 20,000 rollouts"
        seen.page.locator("#rollouts .list").evaluate(
            "list => { list.scrollTop = list.scrollHeight }"
        )
        seen.page.locator("#rollouts .row", has_text="step 10,000").first.click()
        seen.page.wait_for_selector("#rollouts .fact:has-text('10,000')")
        assert seen.count("#rollouts .row") < 60
        seen.go("timeline", "canvas[data-drawn]")
        assert seen.errors == []
