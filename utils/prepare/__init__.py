"""Preparation of token datasets: `prepare_data.py` runs `pipeline.prepare_datasets`.

fetch       hub_datasets.py lists the Hub's datasets and reads its cache, fetch.py fills the cache
plan        source_files.py lists files, work_plan.py decides the format and cuts files into units
read        records.py reads records from all kinds of files, rows.py converts them to documents,
            messages.py reads messages, values.py checks single values, hints.py suggests flags
            for unknown columns
chats       chat_templates.py renders chats, chat_marks.py marks their texts, chat_turns.py finds
            where turns start and end, chat_masks.py checks which text is trained on
tokenize    tokenizer.py loads the tokenizer, encoding.py encodes texts and reads the prompts for
            samples during training, tokenization.py makes token ids and loss masks and writes them
write       units.py prepares the work units, workspace.py stores their files, pipeline.py assembles
            the datasets, append.py adds new sources to finished datasets
"""
