# The same as in plain Python, to the letter.
from raydix.cache_core.plain_kernels import Children as Children
from raydix.cache_core.plain_kernels import Key as Key
from raydix.cache_core.plain_kernels import Node as Node
from raydix.cache_core.plain_kernels import Row as Row
from raydix.cache_core.plain_kernels import begins_alike as begins_alike
from raydix.cache_core.plain_kernels import compact as compact
from raydix.cache_core.plain_kernels import cut as cut
from raydix.cache_core.plain_kernels import expand as expand
from raydix.cache_core.plain_kernels import gather as gather
from raydix.cache_core.plain_kernels import grow as grow
from raydix.cache_core.plain_kernels import is_row as is_row
from raydix.cache_core.plain_kernels import join as join
from raydix.cache_core.plain_kernels import lock_path as lock_path
from raydix.cache_core.plain_kernels import pack as pack
from raydix.cache_core.plain_kernels import take_back as take_back
from raydix.cache_core.plain_kernels import unlock_path as unlock_path
from raydix.cache_core.plain_kernels import walk as walk
