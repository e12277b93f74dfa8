from collections import Counter

import pytest

from vramfit.starter.questions import Chat, chats, questions_about
from vramfit.starter.reading import read
from vramfit.starter.stories import stories


@pytest.fixture(scope="module")
def asked() -> list[Chat]:
    return list(chats(21, 3000))


def test_same_seed_same_chats(asked: list[Chat]) -> None:
    assert list(chats(21, 50)) == asked[:50]


def test_rows_are_one_exchange(asked: list[Chat]) -> None:
    for chat in asked[:100]:
        assert chat.row == {
            "messages": [{"role": "user", "content": chat.user}, {"role": "assistant", "content": chat.assistant}]
        }


def test_all_topics_are_asked_and_one_in_eight_asks_for_a_story(asked: list[Chat]) -> None:
    topics = Counter(chat.topic for chat in asked)
    assert set(topics) == {"who", "where", "what", "why", "help", "end", "story"}
    assert topics["story"] / len(asked) == pytest.approx(1 / 8, abs=0.03)


def test_a_story_that_was_asked_for_is_about_who_was_asked_for(asked: list[Chat]) -> None:
    for chat in asked:
        if chat.topic == "story":
            facts = chat.story.facts
            assert chat.user == f"Tell me a story about a {facts['trait']} {facts['kind']} named {facts['name']}."
            assert read(chat.assistant).whole and facts["name"] in chat.assistant


def test_questions_follow_the_story(asked: list[Chat]) -> None:
    for chat in asked:
        if chat.topic != "story":
            story, question = chat.user.split("\n\n")
            assert story == chat.story.text and question.endswith("?")


def test_answers_are_facts_of_the_story() -> None:
    for story in stories(31, 1500):
        facts = story.facts
        answers = {question.question: question.answer for question in questions_about(story)}
        assert len(answers) == len(questions_about(story))
        assert answers[f"Where did {facts['name']} live?"] == f"{facts['name']} lived {facts['home']}."
        assert answers[f"Who helped {facts['name']}?"] == f"The {facts['helper']} helped {facts['name']}."
        assert facts["name"] in answers["Who is the story about?"]
        for answer in answers.values():
            assert answer.endswith(".") and "{" not in answer
        if facts["wish"] in ("lost", "gift", "make"):
            assert answers[f"Where was the {facts['thing']}?"] == f"The {facts['thing']} was {facts['spot']}."
            assert facts["spot"] in story.text
        if facts["mode"] == "kind":
            reason = (
                answers[f"Why did the {facts['helper']} help?"].removeprefix(f"Because {facts['name']} ").rstrip(".")
            )
            assert reason in story.text
        if facts["wish"] in ("gift", "visit"):
            assert any(question.startswith(f"Why did {facts['name']} want") for question in answers)


def test_why_it_was_hard_is_said_in_the_story_for_skills_and_journeys() -> None:
    for story in stories(33, 1500):
        if story.facts["wish"] not in ("learn", "visit"):
            continue
        answers = {question.question: question.answer for question in questions_about(story)}
        reason = answers["Why was that hard?"].removeprefix("Because ").rstrip(".")
        name, she = story.facts["name"], story.facts["she"]
        assert reason in story.text or reason.replace(name, she) in story.text
