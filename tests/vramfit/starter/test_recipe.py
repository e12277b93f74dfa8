from vramfit.config import STARTER_QUESTIONS, STARTER_STORIES, RunConfig
from vramfit.starter.corpus import CHATS, CHATS_SEED, CORPUS_SEED, STORIES, corpus_workload
from vramfit.starter.questions import chats
from vramfit.starter.recipe import questions_run, starter_run
from vramfit.starter.stories import stories


def test_both_runs_round_trip_through_json() -> None:
    for run in (starter_run(), questions_run("some folder")):
        assert RunConfig.from_json(run.to_json()) == run


def test_start_with_nothing_touched_tells_stories() -> None:
    run = starter_run()
    assert (run.method, run.model.source, run.data.paths) == ("pretrain", "starter", (STARTER_STORIES,))
    assert len(run.output.prompts) >= 2 and run.output.sample_tokens >= corpus_workload(STARTER_STORIES).longest_tokens


def test_every_story_is_seen_about_twice() -> None:
    run = starter_run()
    assert run.schedule.max_steps is not None
    seen = run.schedule.max_steps * run.schedule.sequences_per_step
    assert 1.5 < seen / (STORIES * (1 - run.data.eval_share)) <= 2.0


def test_prompts_are_openings_that_no_story_of_the_corpus_continues_alone() -> None:
    told = [story.text for story in stories(CORPUS_SEED, STORIES)]
    for prompt in starter_run().output.prompts:
        continued = {text for text in told if text.startswith(prompt)}
        assert len({text.removeprefix(prompt)[:200] for text in continued}) == len(continued)


def test_questions_run_asks_about_a_story_that_is_not_in_the_data() -> None:
    run = questions_run("some folder")
    assert (run.method, run.model.source, run.data.paths) == ("lora", "some folder", (STARTER_QUESTIONS,))
    asked = {chat.user for chat in chats(CHATS_SEED, CHATS)}
    assert run.output.prompts[0].endswith("?") and run.output.prompts[0] not in asked
