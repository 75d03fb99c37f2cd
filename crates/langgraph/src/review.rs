//! Answering a run that waits: one question after the other, until there is an answer for all of them.

use serde_json::{Map, Value, json};

use crate::interrupt::{Action, Asks, Interrupt};

/// What a person says to one [`Ask`].
#[derive(Clone, Debug, PartialEq)]
pub enum Decision {
    Approve,
    /// Do it with these arguments instead.
    Edit(Value),
    /// Don't, and tell the agent why.
    Reject(String),
    /// Words in place of the action, or to a question.
    Respond(String),
}

/// What is to be decided next.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Ask<'a> {
    Action(&'a Action),
    Words(&'a str),
}

/// The interrupts of a run with what was decided of them so far.
#[derive(Clone, Debug, PartialEq)]
pub struct Review {
    interrupts: Vec<Interrupt>,
    decided: Vec<Vec<Decision>>,
}

impl Review {
    /// `None` where nothing is asked.
    pub fn of(interrupts: Vec<Interrupt>) -> Option<Self> {
        let decided = vec![Vec::new(); interrupts.len()];
        (!interrupts.is_empty()).then_some(Self { interrupts, decided })
    }

    pub fn next(&self) -> Option<Ask<'_>> {
        let (interrupt, decided) = self.interrupts.iter().zip(&self.decided).find(|(i, d)| d.len() < i.asks.count())?;
        Some(match &interrupt.asks {
            Asks::Review(actions) | Asks::OldReview(actions) => Ask::Action(&actions[decided.len()]),
            Asks::Words(text) => Ask::Words(text),
        })
    }

    /// Which question this is, and of how many.
    pub fn place(&self) -> (usize, usize) {
        let decided: usize = self.decided.iter().map(Vec::len).sum();
        let all = self.interrupts.iter().map(|i| i.asks.count()).sum();
        (decided + 1, all)
    }

    /// Takes the decision of [`Review::next`]; why not, where it isn't one that was offered.
    pub fn decide(&mut self, decision: Decision) -> Result<(), &'static str> {
        match (self.next(), &decision) {
            (None, _) => return Err("there is nothing to decide"),
            (Some(Ask::Words(_)), Decision::Respond(_)) => {}
            (Some(Ask::Words(_)), _) => return Err("this is a question: answer it in words"),
            (Some(Ask::Action(action)), Decision::Edit(_)) if !action.may_edit => return Err("this may not be edited"),
            (Some(Ask::Action(action)), Decision::Reject(_)) if !action.may_reject => return Err("this may not be rejected"),
            (Some(Ask::Action(action)), Decision::Respond(_)) if !action.may_respond => return Err("this is approved, edited or rejected"),
            (Some(Ask::Action(_)), Decision::Edit(args)) if !args.is_object() => {
                return Err("arguments are a JSON object, such as {\"command\": \"ls\"}");
            }
            _ => {}
        }
        let open = self.interrupts.iter().zip(&mut self.decided).find(|(i, d)| d.len() < i.asks.count());
        if let Some((_, decided)) = open {
            decided.push(decision);
        }
        Ok(())
    }

    /// What the run is resumed with, once all is decided.
    pub fn answer(&self) -> Option<Value> {
        if self.next().is_some() {
            return None;
        }
        let answers: Vec<Value> = self.interrupts.iter().zip(&self.decided).map(|(i, decided)| answer_to(&i.asks, decided)).collect();
        match <[Value; 1]>::try_from(answers) {
            Ok([only]) => Some(only),
            Err(answers) => {
                let named = self.interrupts.iter().zip(answers).filter_map(|(i, answer)| Some((i.id.clone()?, answer)));
                Some(Value::Object(named.collect::<Map<_, _>>()))
            }
        }
    }
}

impl Asks {
    fn count(&self) -> usize {
        match self {
            Asks::Review(actions) | Asks::OldReview(actions) => actions.len(),
            Asks::Words(_) => 1,
        }
    }
}

fn answer_to(asks: &Asks, decided: &[Decision]) -> Value {
    match asks {
        Asks::Review(actions) => {
            json!({"decisions": actions.iter().zip(decided).map(|(action, d)| newer(action, d)).collect::<Vec<_>>()})
        }
        Asks::OldReview(actions) => actions.iter().zip(decided).map(|(action, d)| older(action, d)).collect(),
        Asks::Words(_) => match decided.first() {
            // A graph that wants a number or an object is given one where the words are that.
            Some(Decision::Respond(words)) => serde_json::from_str(words).unwrap_or_else(|_| json!(words)),
            _ => Value::Null,
        },
    }
}

fn newer(action: &Action, decision: &Decision) -> Value {
    match decision {
        Decision::Approve => json!({"type": "approve"}),
        Decision::Edit(args) => json!({"type": "edit", "edited_action": {"name": action.name, "args": args}}),
        Decision::Reject(why) if why.is_empty() => json!({"type": "reject"}),
        Decision::Reject(why) => json!({"type": "reject", "message": why}),
        Decision::Respond(words) => json!({"type": "respond", "message": words}),
    }
}

fn older(action: &Action, decision: &Decision) -> Value {
    match decision {
        Decision::Approve => json!({"type": "accept", "args": null}),
        Decision::Edit(args) => json!({"type": "edit", "args": {"action": action.name, "args": args}}),
        Decision::Reject(_) => json!({"type": "ignore", "args": null}),
        Decision::Respond(words) => json!({"type": "response", "args": words}),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(value: Value) -> Review {
        Review::of(Interrupt::read_all(&value)).unwrap()
    }

    #[test]
    fn a_run_is_resumed_when_every_action_was_decided() {
        let mut review = asked(json!([{"id": "i", "value": {"action_requests": [
            {"name": "execute", "args": {"command": "a"}}, {"name": "write_file", "args": {}}, {"name": "delete", "args": {}}]}}]));
        assert!(matches!(review.next(), Some(Ask::Action(a)) if a.name == "execute"));
        assert_eq!(review.place(), (1, 3));
        review.decide(Decision::Approve).unwrap();
        assert!(review.decide(Decision::Edit(json!("no object"))).is_err());
        review.decide(Decision::Edit(json!({"x": 1}))).unwrap();
        assert_eq!(review.answer(), None);
        review.decide(Decision::Reject("not that".into())).unwrap();
        assert_eq!(
            review.answer().unwrap(),
            json!({"decisions": [
                {"type": "approve"},
                {"type": "edit", "edited_action": {"name": "write_file", "args": {"x": 1}}},
                {"type": "reject", "message": "not that"}]})
        );
    }

    #[test]
    fn several_interrupts_are_answered_by_their_ids() {
        let mut review = asked(json!([{"id": "a", "value": "one?"}, {"id": "b", "value": "two?"}]));
        review.decide(Decision::Respond("yes".into())).unwrap();
        assert!(review.decide(Decision::Approve).is_err());
        review.decide(Decision::Respond("{\"n\": 2}".into())).unwrap();
        assert_eq!(review.answer().unwrap(), json!({"a": "yes", "b": {"n": 2}}));
    }

    #[test]
    fn only_what_was_offered_is_taken() {
        let mut review = asked(json!([{"value": {"action_requests": [{"name": "x", "args": {}}],
            "review_configs": [{"action_name": "x", "allowed_decisions": ["approve"]}]}}]));
        assert!(review.decide(Decision::Reject(String::new())).is_err());
        assert!(review.decide(Decision::Edit(json!({}))).is_err());
        review.decide(Decision::Approve).unwrap();
        assert!(review.decide(Decision::Approve).is_err());
    }
}
