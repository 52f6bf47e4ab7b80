"""The name of MiniOneRec is the class of this package."""

from rft_genrec.minionerec.token_extender import TokenExtender
from rft_genrec.prompts import token_extender


def test_the_name_leads_to_the_class() -> None:
    assert TokenExtender is token_extender.TokenExtender
