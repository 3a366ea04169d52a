"""Words that the grader knows: what is counted, and what is not; functions; commands for styles of text."""

COUNTED = """
account acorn action adult age album animal ant apartment apple arrangement arrow article baby bag bagel ball balloon
banana bar baseball basket basketball bat bead bean bear bed bee beetle berry bicycle bike bill bird biscuit block
blueberry boat book boot bottle bouquet bowl box boy bracelet branch bread brick brother brownie bucket bulb bun
burger bus bush butterfly button cabbage cage cake calculator can candle candy car card carrot carton case cat
caterpillar chair cherry chicken child chip chocolate choice church cigarette circle class classmate clip coat coin
color comic computer cookie corn couch cousin cow cracker crate crayon cupcake customer daisy desk diamond die digit
dime dish divisor dog doll donkey donut door doughnut dress drink driver duck duckling ear edge egg elephant employee
engine episode eraser error event exam face fan father file finger fish flight floor flower folder fork friend frog
fruit game gift girl glass glove goal goat goldfish goose grandchild grape grapefruit guest guppy gym hamburger hand
hat head hen hit hole home horse house integer invitation item jar jellybean job joke kangaroo key kid kite kitten
knife lamp lap lawn lawyer leaf leg lemon lesson letter light line lion loaf log lollipop machine magazine man mango
map marble mark marker marshmallow match meal melon member message milkshake minister mistake monkey monster mouse
movie muffin nail necklace nest newspaper nickel night note notebook number nurse nut object onion orange order
outcome outfit owner pack package packet page pail paint painting pan pancake paper parent park parrot part
participant party passenger path peach peanut pear pearl pebble pen pencil penny person pet petal phone photo
photograph picture pie piece pig pigeon pill pillow pineapple pirate pizza plane plant plate player pocket point
possibility post postcard pot potato present prize problem puppy puzzle question rabbit raisin rat recipe ring road
rock room rope rose route row sandwich school seashell season seat section seed segment serving shape sheep sheet
shelf shell ship shirt shoe shop shot shovel show sibling side sister sketch skirt slice slide snack snail snake
snowball sock soda soldier solution song sparrow spider spoon spot stamp star state station step stick sticker stone
store story strawberry street string student subset sweater table tablet task taxi teacher team tent test ticket tile
tire toast toddler token tomato tooth towel town toy track trader train tray tree triangle trip truck tulip turkey
turtle tv unit van vase vegetable vehicle vertex video violin visit visitor vote voter walnut watch watermelon way
wheel window wire wolf woman word worker worm year zebra
"""
"""What word problems count.

Words that are also numbers, fractions or operations (pairs, quarters, squares, times) are units only where the question
asks for them.
"""

IRREGULAR_PLURALS = {
    **{"child": "children", "grandchild": "grandchildren", "die": "dice", "foot": "feet", "goose": "geese"},
    **{"man": "men", "woman": "women", "mouse": "mice", "person": "people", "tooth": "teeth", "vertex": "vertices"},
    **{"knife": "knives", "leaf": "leaves", "loaf": "loaves", "shelf": "shelves", "wolf": "wolves", "life": "lives"},
}
"""The nouns of which the plural is not formed by a rule."""

FUNCTION_WORDS = """
a about above across after again against all almost along already also although always am among an and another any
anyone anything arccos arcsin arctan are around as asked at away be because been before began being below beside
besides between both but by came can cannot cos cosh cost costs cot could csc did different do does doing done down
during each either else enough equal equals even ever every everyone everything exactly except exp false far few fewer
find first for found from gave gcd get gets give given gives go goes going gone got had half has have having he her
here hers herself him himself his how however if in incorrect infinity instead into is it its itself just last lcm
least less let like log made make makes many max may maybe me might min mine mod more most much must my neither never
next no none nor not nothing now of off often on once one only onto or other others otherwise our ours out over own
per perhaps possible possibly put rather same sec second several shall she should sin since sinh so some someone
something sometimes sqrt still such tan tanh than that the their theirs them then there these they this those though
through thus till times to together too took total toward twice under unknown unless unlike until up upon us use used
uses versus very via was way we well went were what whatever when whenever where whereas wherever whether which while
who whoever whole whom whose why will with within without would wrong yes yet you your yours
"""
"""Words that are never units, even if the question puts them behind a number."""

TEXT_STYLES = (
    *("text", "mbox", "textbf", "textit", "textrm", "textnormal", "texttt", "textsf", "textsc"),
    *("mathrm", "operatorname"),
)
"""Commands of which the argument may be words or a unit."""
LETTER_STYLES = ("mathbf", "mathit", "boldsymbol", "bm")
"""Commands that print letters of formulas in another style."""

FUNCTION_NAMES = (
    *("arcsin", "arccos", "arctan", "sinh", "cosh", "tanh"),
    *("sin", "cos", "tan", "cot", "sec", "csc", "log", "exp"),
)
"""Functions of numbers that are written as words."""
