"""Conversion of another toolkit's config to recipes: `python -m utils.importing FILE`.

The results are data recipes for prepare_data.py and a training recipe.

toolkits     the keys of axolotl, LLaMA-Factory and TRL; the state of a conversion
sources      converts the datasets of a config to entries of a data recipe
data_recipes converts the other data settings; one recipe for each kind of documents
conversion   converts all other keys to the training recipe; notes keys without a counterpart
__main__     prints the recipes, or writes them into a folder
"""
