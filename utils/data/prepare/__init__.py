"""Preparation of token datasets: `prepare_data.py` runs `pipeline.Preparation`.

fetch       hub.py knows the Hub's datasets and its cache, fetch.py fills it, also for offline jobs
plan        sources.py lists files, plan.py decides the format and cuts the files into work units
read        records.py reads rows of any kind of file, rows.py and documents.py make them documents
prompts     prompts.py, for samples while a model trains
chats       chat_templates.py renders and marks them, chat_turns.py finds where turns start and end,
            chat_masks.py checks what is trained on
tokenize    tokenizer.py chooses the tokenizer and its template, tokenization.py gives ids and masks
write       units.py runs the work units into workspace.py, pipeline.py assembles the datasets
"""
