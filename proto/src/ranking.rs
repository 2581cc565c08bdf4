//! The order in which edges are kept where not all fit into an answer.

use std::cmp::Reverse;

/// Sorts edges so that, however many of the first ones are kept, half are those with the most failures and half those with
/// the most connections. Thus busy edges never hide failing ones, and failures of one tenant never hide all busy edges.
pub fn by_turns<T>(edges: &mut Vec<T>, begun: impl Fn(&T) -> u64, failed: impl Fn(&T) -> u64) {
    edges.sort_by_key(|edge| Reverse(begun(edge)));
    // Busy edges have the odd places, failing ones the even places, and an edge that is both the better one of its two.
    let busy = (1..).step_by(2).zip(edges.drain(..));
    let mut placed: Vec<(usize, T)> = busy.collect();
    placed.sort_by_key(|(_, edge)| Reverse(failed(edge)));
    for (turn, (place, edge)) in (0..).step_by(2).zip(&mut placed) {
        if failed(edge) > 0 {
            *place = turn.min(*place);
        }
    }
    placed.sort_by_key(|(place, _)| *place);
    edges.extend(placed.into_iter().map(|(_, edge)| edge));
}

#[cfg(test)]
mod tests {
    use super::by_turns;

    #[test]
    fn failing_edges_and_busy_ones_take_turns() {
        let sorted = |mut edges: Vec<(u64, u64)>| {
            by_turns(&mut edges, |edge| edge.0, |edge| edge.1);
            edges
        };
        let found = sorted(vec![(1, 1), (9, 0), (50, 1), (7, 0), (8, 0), (0, 3)]);
        assert_eq!(found, [(0, 3), (50, 1), (9, 0), (1, 1), (8, 0), (7, 0)]);
        // Without failures, those with the most connections come first.
        assert_eq!(sorted(vec![(1, 0), (2, 0)]), [(2, 0), (1, 0)]);
        // A thousand failing edges leave half of ten places.
        let mut many = vec![(1, 1); 1_000];
        many.extend([(500, 0); 20]);
        let kept = sorted(many).into_iter().take(10);
        assert_eq!(kept.filter(|edge| *edge == (500, 0)).count(), 5);
    }
}
