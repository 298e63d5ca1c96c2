"""Conversion of another toolkit's config to recipes: `python -m utils.importing FILE`.

toolkits     the keys of axolotl, LLaMA-Factory and TRL; the state of a conversion
sources      converts the datasets of a config to entries of a data recipe
data_recipes converts other data settings; texts, chats and completions get separate recipes
conversion   converts all other keys to the training recipe; notes keys without a counterpart
__main__     prints the data recipes and the training recipe, or writes them into a folder
"""
