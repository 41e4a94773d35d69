"""Question answering, text to text: SQuAD and closed-book tasks, and answers with their position in the context.

| file | contents |
|---|---|
| `question_tasks.py` | `squad_task`, `closed_book_task`: for gin files and Python; SQuAD's JSON, validated |
| `spans.py` | splits contexts that are longer than the input; finds the position of an answer in its context |
| `answers.py` | answers of a loaded model; `t5x answer --input`: files of questions, chunks that survive a kill |
| `answer_options.py` | the options of `t5x answer` |
"""

# ruff: noqa: F401

from t5x.apps.answering.question_tasks import SquadDataSource, closed_book_task, read_squad, squad_task
