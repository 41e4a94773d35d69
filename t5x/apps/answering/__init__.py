"""Question answering, text to text: SQuAD and closed-book tasks, and answers with their position in the context.

| file | contents |
|---|---|
| `squad.py` | the official JSON of SQuAD 1.1 and 2.0, validated; a data source |
| `question_tasks.py` | `squad_task`, `closed_book_task`: for gin files and Python |
| `spans.py` | splits contexts that are longer than the input; finds the position of an answer in its context |
| `answers.py` | answers of a loaded model |
| `file_answering.py` | `t5x answer --input`: files of questions, validated; chunks that survive a kill |
"""

# ruff: noqa: F401

from t5x.apps.answering.question_tasks import closed_book_task, squad_task
from t5x.apps.answering.squad import SquadDataSource, read_squad
