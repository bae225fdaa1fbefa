"""Tables name -> "module:Class" for every extension point. Strings only, so that any plane may read them."""
