"""What an encoder reads of an item."""

from rft_genrec.catalogue.records import Catalogue, Item
from rft_genrec.embedding.texts import digest_of_texts, item_texts


def test_long_fields_are_cut_off_and_not_left_out() -> None:
    catalogue = Catalogue("tools", (Item("Hammer", "x" * 3000), Item("Saw")))
    assert item_texts(catalogue, 2000) == ["Hammer " + "x" * 2000, "Saw"]
    assert len(item_texts(catalogue, 0)[0]) == 3007
    assert digest_of_texts(["a", "b"]) != digest_of_texts(["a b"])
