import pytest

from vramfit.starter import words
from vramfit.starter.reading import read
from vramfit.starter.stories import Story, stories


@pytest.fixture(scope="module")
def told() -> list[Story]:
    return list(stories(41, 600))


def test_every_story_of_the_grammar_reads_whole(told: list[Story]) -> None:
    for story in told:
        reading = read(story.text)
        assert reading.whole and reading.understood == reading.sentences, story.text


def _changed(story: Story, fact: str, other: str) -> str:
    """The story with the first mention of a fact replaced."""
    return story.text.replace(story.facts[fact], other, 1)


def test_a_changed_name_contradicts(told: list[Story]) -> None:
    for story in told:
        names = words.SHE_NAMES if story.facts["hero"] == "she" else words.HE_NAMES
        other = names[(names.index(story.facts["name"]) + 1) % len(names)]
        reading = read(_changed(story, "name", other))
        assert "name" in reading.contradicted and not reading.whole


def test_a_name_of_the_other_pronoun_contradicts(told: list[Story]) -> None:
    for story in told[:100]:
        other = words.HE_NAMES[0] if story.facts["hero"] == "she" else words.SHE_NAMES[0]
        assert "hero" in read(story.text.replace(story.facts["name"], other)).contradicted


def test_a_changed_place_contradicts(told: list[Story]) -> None:
    returned = [story for story in told if f"near {story.facts['back']}" in story.text]
    assert len(returned) > 100
    for story in returned:
        homes = list(words.HOMES)
        other = homes[(homes.index(story.facts["home"]) + 1) % len(homes)]
        assert read(_changed(story, "home", other)).contradicted & {"home", "back"}


def test_a_helper_with_the_wrong_gift_contradicts(told: list[Story]) -> None:
    for story in told[:100]:
        other = words.HELPERS["sing" if story.facts["obstacle"] != "sing" else "high"][0]
        text = story.text.replace(story.facts["a_helper"], other).replace(story.facts["helper"], words.bare(other))
        assert "obstacle" in read(text).contradicted


def test_what_the_grammar_cannot_say_is_not_understood(told: list[Story]) -> None:
    story = told[0].text
    reading = read(story + " The town the wanted bell sat.")
    assert reading.understood == reading.sentences - 1 and not reading.whole
    assert read("to the it. Sang big? lake of").understood == 0


def test_a_missing_or_doubled_part_is_not_whole(told: list[Story]) -> None:
    story = told[1].text
    assert not read(story.rsplit(". ", 1)[0] + ".").whole
    assert not read(f"{story} {story}").whole


def test_nothing_is_no_story() -> None:
    reading = read("")
    assert (reading.sentences, reading.understood, reading.whole) == (0, 0, False)
