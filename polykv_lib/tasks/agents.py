"""What agents ask about a document: three published questions, and twelve written in their manner.

The paper's runs with 5, 10 and 15 agents used questions that were never published, so those rows
can be repeated in kind but not word by word.
"""

from typing import Final

# arXiv:2604.24971, published code, WikiText-2 and Llama runs; word for word, prefix included.
PUBLISHED: Final = (
    "Agent A: What specific names, places, or dates are mentioned in this text?",
    "Agent B: What is the main subject described in the opening of this passage?",
    "Agent C: Describe any events or processes explained in this text.",
)

# Ours: each can be answered from any encyclopaedia article, and no two ask for the same thing.
WRITTEN: Final = (
    "Agent D: Which people or groups act in this text, and what did one of them do?",
    "Agent E: Which numbers or quantities does the text give, and what do they measure?",
    "Agent F: What cause or reason does the text give for something that it describes?",
    "Agent G: What effect or consequence does the text describe?",
    "Agent H: Which two things does the text compare or contrast, and how do they differ?",
    "Agent I: Which disagreement, problem or criticism does the text mention?",
    "Agent J: Which special term does the text use, and what does it mean?",
    "Agent K: Why is the subject of this text important, according to the text?",
    "Agent L: What is the earliest thing in time that the text mentions?",
    "Agent M: What is the most recent state or development that the text reports?",
    "Agent N: Give one example that the text uses to illustrate a point.",
    "Agent O: Summarise this text in two sentences.",
)


def questions(n_agents: int) -> list[str]:
    """The questions of the first `n_agents` agents, A to O: three published, then the written ones.

    Raises:
        ValueError: There are fewer questions than agents, or no agent.
    """
    known = (*PUBLISHED, *WRITTEN)
    if not 1 <= n_agents <= len(known):
        raise ValueError(
            f"n_agents={n_agents}, but there are questions for 1 to {len(known)} agents."
        )
    return list(known[:n_agents])
