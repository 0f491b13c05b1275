import pytest

from polykv_lib.tasks.agents import PUBLISHED, questions


def test_published_questions_come_first_and_fifteen_agents_ask_fifteen_things() -> None:
    assert questions(3) == list(PUBLISHED)
    asked = questions(15)
    assert len({question.split(": ")[1].lower() for question in asked}) == 15
    assert [question.split(":")[0] for question in asked] == [
        f"Agent {c}" for c in "ABCDEFGHIJKLMNO"
    ]


@pytest.mark.parametrize("n_agents", [0, 16])
def test_more_agents_than_questions_is_refused(n_agents: int) -> None:
    with pytest.raises(
        ValueError, match=f"n_agents={n_agents}, but there are questions for 1 to 15"
    ):
        questions(n_agents)
